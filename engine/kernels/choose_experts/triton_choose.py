"""One program a row: K times the best of what is left.

A row's scores stay in registers. What is no number is never chosen: such a row gets expert E, which
`grouped_experts` takes for none.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# Triton ships no types, and its kernels are typed by their launch.

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.errors import BackendError
from engine.kernels.choose_experts.problem import SCORE_SUM_EPS
from engine.kernels.machine import chains
from engine.kernels.triton_build import chained, triton_kernel
from engine.kernels.triton_device import check_device, on_device

if TYPE_CHECKING:
    from engine.kernels.choose_experts.problem import Problem
    from engine.kernels.op import Kernel

NUM_WARPS = 4  # a few experts a thread; a maximum over the block is what a choice costs
EPS = tl.constexpr(SCORE_SUM_EPS)


@triton.jit
def best_of(values, ids, limit):
    """The largest value and the lowest id that has it; `limit` where nothing is left."""
    best = tl.max(values, 0)
    return best, tl.min(tl.where((values == best) & (values > float("-inf")), ids, limit), 0)


@triton.jit
def keep_groups(
    priority, experts, E,
    NUM_GROUPS: tl.constexpr, KEPT: tl.constexpr, BLOCK_GROUPS: tl.constexpr,
):  # fmt: skip
    """Priorities with -inf outside the groups whose best two sum to most."""
    groups = tl.arange(0, BLOCK_GROUPS)
    own = experts // (E // NUM_GROUPS)
    scores = tl.full([BLOCK_GROUPS], float("-inf"), tl.float32)
    for group in range(NUM_GROUPS):
        inside = tl.where(own == group, priority, float("-inf"))
        first, place = best_of(inside, experts, E)
        second = tl.max(tl.where(experts == place, float("-inf"), inside), 0)
        scores = tl.where(groups == group, first + second, scores)
    kept = tl.zeros_like(experts)
    for _ in range(KEPT):
        _, group = best_of(scores, groups, NUM_GROUPS)
        kept = tl.where(own == group, 1, kept)
        scores = tl.where(groups == group, float("-inf"), scores)
    return tl.where(kept != 0, priority, float("-inf"))


@triton.jit
def choose_kernel(
    logits_ptr,  # [M, E] float32
    bias_ptr,  # [E] float32
    ids_ptr,  # [M, K] int64
    weights_ptr,  # [M, K] float32
    E, scaling, stride_logits,
    K: tl.constexpr, IS_NORMALISED: tl.constexpr, NUM_GROUPS: tl.constexpr, KEPT: tl.constexpr,
    BLOCK_EXPERTS: tl.constexpr, BLOCK_CHOICES: tl.constexpr, BLOCK_GROUPS: tl.constexpr,
    IS_CHAINED: tl.constexpr,  # starts before the launch ahead has ended; a device only
):  # fmt: skip
    """Write the choices of one row."""
    if IS_CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, BLOCK_EXPERTS)
    live = experts < E
    scores = tl.sigmoid(tl.load(logits_ptr + row * stride_logits + experts, mask=live, other=0.0))
    priority = scores + tl.load(bias_ptr + experts, mask=live, other=0.0)
    priority = tl.where(live, priority, float("-inf"))
    if KEPT < NUM_GROUPS:
        priority = keep_groups(priority, experts, E, NUM_GROUPS, KEPT, BLOCK_GROUPS)

    choices = tl.arange(0, BLOCK_CHOICES)
    ids = tl.zeros([BLOCK_CHOICES], tl.int32)
    weights = tl.zeros([BLOCK_CHOICES], tl.float32)
    for choice in range(K):
        _, expert = best_of(priority, experts, E)
        score = tl.sum(tl.where(experts == expert, scores, 0.0), 0)
        ids = tl.where(choices == choice, expert, ids)
        weights = tl.where(choices == choice, score, weights)
        priority = tl.where(experts == expert, float("-inf"), priority)
    if IS_NORMALISED:
        weights = weights / (tl.sum(weights, 0) + EPS)
    at = row * K + choices
    tl.store(ids_ptr + at, ids.to(tl.int64), mask=choices < K)
    tl.store(weights_ptr + at, weights * scaling, mask=choices < K)


def run(problem: Problem) -> None:
    """Write the choice in one launch."""
    _check(problem)
    device = problem.logits.device
    with on_device(device):
        arguments, meta = _launch(problem)
        choose_kernel[(len(problem.logits),)](*arguments, **meta)


def kernels(problem: Problem, arch: int) -> tuple[Kernel, ...]:
    """Return the kernel of the launch, ready to be compiled."""
    return (triton_kernel(choose_kernel, *_launch(problem, is_compiled=True), arch),)


def _launch(
    problem: Problem, *, is_compiled: bool = False
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    choice, logits = problem.choice, problem.logits
    is_chained = is_compiled or chains(logits.device)
    arguments = (
        *(logits, problem.bias, choice.expert_ids, choice.expert_weights),
        *(problem.num_experts, problem.scaling, logits.stride(0)),
    )
    meta = {
        "K": problem.top_k,
        "IS_NORMALISED": problem.is_normalised,
        "NUM_GROUPS": problem.num_groups,
        "KEPT": problem.kept_groups,
        "BLOCK_EXPERTS": triton.next_power_of_2(problem.num_experts),
        "BLOCK_CHOICES": triton.next_power_of_2(problem.top_k),
        "BLOCK_GROUPS": triton.next_power_of_2(problem.num_groups),
        "num_warps": NUM_WARPS,
    }
    return arguments, meta | chained(is_chained=is_chained)


def _check(problem: Problem) -> None:
    """Refuse what the kernel cannot run."""
    check_device(problem.logits.device)
    if problem.logits.dtype != torch.float32:
        raise BackendError(f"backend triton: expected float32 logits, got {problem.logits.dtype}")
