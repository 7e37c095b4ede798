"""What the ops ask of tensors: shapes, dtypes, layouts, one device, room to work in.

Owns the refusals that all ops share, and the id of no token. Knows no op.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engine.errors import ShapeError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from torch import Tensor

MOST_SPLITS = 65535  # third dim of a CUDA grid
COPY_BYTES = 16  # of the widest load and store of a thread
NO_TOKEN = -1  # where logits are no distribution


def check_tensor(
    name: str,
    tensor: Tensor,
    shape: tuple[int | None, ...],
    dtypes: tuple[torch.dtype, ...],
    *,
    last_contiguous: bool = True,
) -> None:
    """Raise ShapeError unless `tensor` has this shape (None: any), dtype and layout."""
    fits = tensor.dim() == len(shape) and all(
        want is None or want == have for want, have in zip(shape, tensor.shape, strict=True)
    )
    if not fits:
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise ShapeError(f"{name}: expected shape [{wanted}], got {list(tensor.shape)}")
    if tensor.dtype not in dtypes:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ShapeError(f"{name}: expected dtype {wanted}, got {tensor.dtype}")
    if last_contiguous and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ShapeError(
            f"{name}: expected a contiguous last dim, got strides {tensor.stride()} "
            "(nothing is copied behind the caller's back)"
        )


def check_device(device: torch.device, others: Iterable[Tensor | None]) -> None:
    """Raise ShapeError unless all tensors that are there lie on `device`."""
    for other in others:
        if other is not None and other.device != device:
            raise ShapeError(f"operands: expected all on {device}, got one on {other.device}")


def check_num_splits(num_splits: int | None) -> None:
    """Raise ShapeError for a number of splits that no grid has."""
    if num_splits is not None and not 1 <= num_splits <= MOST_SPLITS:
        raise ShapeError(
            f"num_splits: expected 1..{MOST_SPLITS}, got {num_splits} (a dim of the grid)"
        )


def is_copyable(tensor: Tensor) -> bool:
    """Whether a thread's widest loads fit: begin and steps are multiples of COPY_BYTES."""
    steps = (
        stride * tensor.itemsize
        for stride, size in zip(tensor.stride()[:-1], tensor.shape[:-1], strict=True)
        if size > 1
    )
    return tensor.data_ptr() % COPY_BYTES == 0 and all(step % COPY_BYTES == 0 for step in steps)


def room(
    workspace: Tensor | None,
    size: int,
    device: torch.device,
    *,
    reason: str = "",
    is_aligned: bool = False,
) -> Tensor:
    """Return `size` float32 numbers to work in: the caller's workspace, or new ones without it.

    `reason` says in the refusal what takes them; `is_aligned` asks for a begin that a thread's
    widest load can take.
    """
    if workspace is None:
        return torch.empty(size, dtype=torch.float32, device=device)
    fits = workspace.dtype == torch.float32 and workspace.device == device
    begins = not is_aligned or workspace.data_ptr() % COPY_BYTES == 0
    if not fits or not begins or not workspace.is_contiguous() or workspace.numel() < size:
        begin = f" from a multiple of {COPY_BYTES} bytes on" if is_aligned else ""
        raise ShapeError(
            f"workspace: expected at least {size} contiguous float32 on {device}{begin}{reason}, "
            f"got {workspace.numel()} {workspace.dtype} on {workspace.device} with strides "
            f"{workspace.stride()}"
        )
    return workspace.view(-1)[:size]
