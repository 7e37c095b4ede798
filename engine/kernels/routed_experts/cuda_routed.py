"""The CUDA C++ implementation: the kernels of grouped experts, the first of which also chooses.

They are those of `csrc/grouped_experts.cu`; see there for the idea.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from engine.errors import BackendError
from engine.kernels.grouped_experts import cuda_int4
from engine.kernels.machine import arch_of

if TYPE_CHECKING:
    from engine.kernels.grouped_experts.cuda_int4 import Cut
    from engine.kernels.op import Kernel
    from engine.kernels.routed_experts.problem import Problem

MOST_CHOICES, MOST_CHOICES_OF_ROW = 1024, 32


def run(problem: Problem) -> None:
    """Write the choice and the rows in four launches, each queued while the one before ends."""
    experts = problem.experts
    cuda_int4.check(experts)
    check_rows(problem)
    device = experts.x.device
    with torch.cuda.device(device):
        stream = torch.cuda.current_stream(device)
        cut = cut_of(problem, arch_of(device))
        kernels = cuda_int4.loaded(device, cut, experts.inner)
        cuda_int4.queue(experts, cut, kernels, stream, more_params(problem))


def check_rows(problem: Problem) -> None:
    """Refuse what the kernels cannot take beyond what those of grouped experts cannot."""
    M, K = problem.choosing.choice.expert_ids.shape
    if M * K > MOST_CHOICES or K > MOST_CHOICES_OF_ROW:
        raise BackendError(
            f"moe backend cuda: expected at most {MOST_CHOICES} choices and "
            f"{MOST_CHOICES_OF_ROW} of a row, got {M} rows of {K}"
        )


def cut_of(problem: Problem, arch: int) -> Cut:
    """Return the cut of the experts, with a choice in front."""
    experts, is_behind = problem.experts.num_experts, int(problem.logits_are_there)
    return replace(cuda_int4.cut_of(problem.experts, arch), experts=experts, behind=is_behind)


def kernels(problem: Problem, arch: int) -> tuple[Kernel, ...]:
    """Return what is launched for a problem; nothing for operands the kernels do not take."""
    try:
        cuda_int4.check_rows(problem.experts)
        check_rows(problem)
    except BackendError:
        return ()
    return cuda_int4.kernels_of(problem.experts, cut_of(problem, arch), arch)


def more_params(problem: Problem) -> dict[str, int | float]:
    """Return the fields of the parameters that grouped experts have no use for."""
    choosing = problem.choosing
    pointers = {
        "logits": choosing.logits,
        "bias": choosing.bias,
        "chosen_ids": choosing.choice.expert_ids,
        "chosen_weights": choosing.choice.expert_weights,
    }
    return {
        **{name: tensor.data_ptr() for name, tensor in pointers.items()},
        "logits_row": choosing.logits.stride(0),
        "scaling": choosing.scaling,
        "is_normalised": int(choosing.is_normalised),
    }
