"""Bounds of float32 in Triton's words, and numbers brought within them. Knows no op."""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# Triton ships no types.

from __future__ import annotations

import torch
import triton
import triton.language as tl

LEAST = tl.constexpr(torch.finfo(torch.float32).min)
MOST = tl.constexpr(torch.finfo(torch.float32).max)
TINY = tl.constexpr(torch.finfo(torch.float32).tiny)


@triton.jit
def finite(numbers):
    """The nearest numbers that are none of the infinities."""
    return tl.minimum(tl.maximum(numbers, LEAST), MOST)
