"""Two attentions over parts of the same rows become one: the last launch of a cascade.

Stock cascades bring merges of their own, which want the LSE in one layout and are fed copies. This
one reads it as either library leaves it, so that a cascade spends one launch here and no copy.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# Triton ships no types; an annotation other than constexpr does not compile.

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

LN_2: Final = tl.constexpr(0.6931471805599453)


def merge_fa3(part: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> Tensor:
    """Merge what FlashAttention-3 returned: its LSE is `[H, M]`, natural. See `_merge`."""
    return _merge(part, other, is_flashinfer=False)


def merge_flashinfer(part: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor]) -> Tensor:
    """Merge what FlashInfer returned: its LSE is `[M, H]`, to base 2. See `_merge`."""
    return _merge(part, other, is_flashinfer=True)


def _merge(
    part: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor], *, is_flashinfer: bool
) -> Tensor:
    """Return the attention over the rows of both parts, written to the first one's output.

    Parameters
    ----------
    part, other : (out [M, H, V], lse float32), all contiguous, V a power of two
        Each over its own rows. The first `out` is mutated.

    Returns
    -------
    Tensor
        The first `out`; a row that sees nothing in either part is NaN.
    """
    out, lse = part
    num_rows, num_heads, width = out.shape
    _merge_kernel[(num_rows, num_heads)](out, lse, *other, is_flashinfer=is_flashinfer, width=width)
    return out


@triton.jit
def _merge_kernel(  # noqa: ANN202
    out,  # noqa: ANN001
    lse,  # noqa: ANN001
    other_out,  # noqa: ANN001
    other_lse,  # noqa: ANN001
    is_flashinfer: tl.constexpr,
    width: tl.constexpr,
):
    row, head = tl.program_id(0), tl.program_id(1)
    num_rows, num_heads = tl.num_programs(0), tl.num_programs(1)
    entry = row * num_heads + head if is_flashinfer else head * num_rows + row
    a, b = tl.load(lse + entry), tl.load(other_lse + entry)
    if is_flashinfer:
        a, b = a * LN_2, b * LN_2
    most = tl.maximum(a, b)
    a, b = tl.exp(a - most), tl.exp(b - most)
    at = (row * num_heads + head).to(tl.int64) * width + tl.arange(0, width)
    x = tl.load(out + at).to(tl.float32)
    y = tl.load(other_out + at).to(tl.float32)
    tl.store(out + at, (a * x + b * y) / (a + b))
