"""Two launches: the best of each part of a row and its sum, then those of the row.

Parts depend on the vocabulary alone, so that a row has the same sums in any company.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# Triton ships no types, and its kernels are typed by their launch.

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from engine.kernels.machine import chains
from engine.kernels.operands import NO_TOKEN
from engine.kernels.triton_build import TritonLaunch, chained
from engine.kernels.triton_device import check_device, on_device
from engine.kernels.triton_numbers import LEAST, TINY, finite

if TYPE_CHECKING:
    from engine.kernels.greedy_tokens.problem import Problem
    from engine.kernels.op import Kernel

LEAST_PART = 2048  # tokens
MOST_PARTS = 64  # of a row
TOKENS_PER_WARP = 512  # 16 in the registers of a thread
NO_ID = tl.constexpr(2**31 - 1)
NONE = tl.constexpr(NO_TOKEN)


@triton.jit
def part_greedy_kernel(
    logits_ptr,  # [M, V] float32
    most_ptr, sums_ptr,  # [M, parts] float32
    ids_ptr,  # [M, parts] int32
    V, num_parts, stride_logits,
    BLOCK_TOKENS: tl.constexpr,
    IS_CHAINED: tl.constexpr,  # starts before the launch ahead has ended; a device only
):  # fmt: skip
    """Write the largest logit of one part of a row, its lowest id and the part's sum."""
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    tokens = part * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    if IS_CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    at = logits_ptr + row * stride_logits + tokens
    logits = tl.load(at, mask=tokens < V, other=float("-inf"))
    most = tl.max(logits, 0)  # NaN left out, but not of the sum
    first = tl.min(tl.where(logits == most, tokens, NO_ID), 0)
    total = tl.sum(tl.exp(logits - finite(most)), 0)  # infinite with an infinite logit
    tl.store(most_ptr + row * num_parts + part, most)
    tl.store(ids_ptr + row * num_parts + part, first)
    tl.store(sums_ptr + row * num_parts + part, total)


@triton.jit
def row_greedy_kernel(
    most_ptr, sums_ptr,  # [M, parts] float32
    ids_ptr,  # [M, parts] int32
    tokens_ptr,  # [M] int64
    log_probs_ptr,  # [M] float32
    num_parts,
    BLOCK_PARTS: tl.constexpr, IS_CHAINED: tl.constexpr,
):  # fmt: skip
    """Write the likeliest token of one row and its log-prob."""
    row = tl.program_id(0).to(tl.int64)
    parts = tl.arange(0, BLOCK_PARTS)
    at, is_part = row * num_parts + parts, parts < num_parts
    if IS_CHAINED:
        gdc_wait()
        gdc_launch_dependents()
    most_of_parts = tl.load(most_ptr + at, mask=is_part, other=float("-inf"))
    ids = tl.load(ids_ptr + at, mask=is_part, other=NO_ID)
    sums = tl.load(sums_ptr + at, mask=is_part, other=0.0)
    most = tl.max(most_of_parts, 0)
    first = tl.min(tl.where(most_of_parts == most, ids, NO_ID), 0)
    total = tl.sum(sums * tl.exp(finite(most_of_parts) - finite(most)), 0)
    is_sound = (total < float("inf")) & (most >= LEAST)
    tl.store(tokens_ptr + row, tl.where(is_sound, first.to(tl.int64), NONE))
    tl.store(log_probs_ptr + row, finite(most) - (tl.log(tl.maximum(total, TINY)) + finite(most)))


def run(problem: Problem) -> None:
    """Write tokens and log-probs in two launches."""
    check_device(problem.logits.device)
    device = problem.logits.device
    with on_device(device):
        for one in _launches(problem, is_chained=chains(device)):
            one.start()


def kernels(problem: Problem, arch: int) -> tuple[Kernel, ...]:
    """Return the kernels of both launches, ready to be compiled."""
    return tuple(one.kernel(arch) for one in _launches(problem, is_chained=True))


def _launches(problem: Problem, *, is_chained: bool) -> tuple[TritonLaunch, TritonLaunch]:
    logits, greedy = problem.logits, problem.greedy
    M, V = logits.shape
    size = max(LEAST_PART, triton.next_power_of_2(triton.cdiv(V, MOST_PARTS)))
    P = triton.cdiv(V, size)
    most, sums = torch.empty(2, M, P, dtype=torch.float32, device=logits.device).unbind()
    ids = torch.empty(M, P, dtype=torch.int32, device=logits.device)
    chain = chained(is_chained=is_chained)
    part_meta = {"BLOCK_TOKENS": size, "num_warps": size // TOKENS_PER_WARP}
    whole_meta = {"BLOCK_PARTS": triton.next_power_of_2(P), "num_warps": 1}
    parts = (logits, most, sums, ids, V, P, logits.stride(0))
    whole = (most, sums, ids, greedy.tokens, greedy.log_probs, P)
    return (
        TritonLaunch(part_greedy_kernel, (M, P), parts, chain | part_meta),
        TritonLaunch(row_greedy_kernel, (M,), whole, chain | whole_meta),
    )
