"""Two attentions over parts of the same rows become one: the last launch of a cascade.

Stock cascades bring merges of their own, which want the LSE in one layout and are fed copies. This
one reads it as either library leaves it, so that a cascade spends one launch here and no copy.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"
# Triton ships no types; an annotation other than constexpr does not compile.

from typing import Final

import torch
import triton
import triton.language as tl
from torch import Tensor

NATURAL: Final = 1.0  # nats for each unit of an LSE: FlashAttention-3
BINARY: Final = 0.6931471805599453  # of one to base 2: FlashInfer


def merge(
    part: tuple[Tensor, Tensor], other: tuple[Tensor, Tensor], *, nats_per_unit: float
) -> Tensor:
    """Return the attention over the rows of both parts.

    Parameters
    ----------
    part, other : (out [M, H, V], lse [M, H] float32)
        Each over its own rows; `out` contiguous, `lse` of any strides, -inf where nothing was seen.
    nats_per_unit : float
        Unit of both LSEs, NATURAL or BINARY.

    Returns
    -------
    Tensor
        [M, H, V], dtype of `out`; a row that sees nothing in either part is NaN.
    """
    (out, lse), (other_out, other_lse) = part, other
    merged = torch.empty_like(out)
    num_rows, num_heads, width = out.shape
    _merge_kernel[(num_rows, num_heads)](
        out,
        lse,
        other_out,
        other_lse,
        merged,
        *lse.stride(),
        *other_lse.stride(),
        nats_per_unit,
        width=width,
        tile=triton.next_power_of_2(width),
    )
    return merged


@triton.jit
def _merge_kernel(  # noqa: ANN202, PLR0913, PLR0917 - typed by its launch
    out,  # noqa: ANN001
    lse,  # noqa: ANN001
    other_out,  # noqa: ANN001
    other_lse,  # noqa: ANN001
    merged,  # noqa: ANN001
    lse_row_stride,  # noqa: ANN001
    lse_head_stride,  # noqa: ANN001
    other_row_stride,  # noqa: ANN001
    other_head_stride,  # noqa: ANN001
    nats_per_unit,  # noqa: ANN001
    width: tl.constexpr,
    tile: tl.constexpr,
):
    row, head = tl.program_id(0), tl.program_id(1)
    a = tl.load(lse + row * lse_row_stride + head * lse_head_stride) * nats_per_unit
    b = tl.load(other_lse + row * other_row_stride + head * other_head_stride) * nats_per_unit
    most = tl.maximum(a, b)
    a, b = tl.exp(a - most), tl.exp(b - most)
    column = tl.arange(0, tile)
    inside = column < width
    at = (row * tl.num_programs(1) + head).to(tl.int64) * width + column
    x = tl.load(out + at, mask=inside).to(tl.float32)
    y = tl.load(other_out + at, mask=inside).to(tl.float32)
    tl.store(merged + at, (a * x + b * y) / (a + b), mask=inside)
