"""Tensors with memory before and behind them that nobody may touch: a stray read ends the process."""

import ctypes
import mmap

import torch

_KEPT = []  # regions stay mapped: a tensor does not own its own
_NO_ACCESS = 0


def guarded(tensor, *, at_end):
    """Return a contiguous copy of a CPU tensor that ends, or begins, where a forbidden page does."""
    page = mmap.PAGESIZE
    num_bytes = tensor.numel() * tensor.element_size()
    room = -(-max(num_bytes, 1) // page) * page
    region = mmap.mmap(-1, room + 2 * page)
    start = ctypes.addressof(ctypes.c_char.from_buffer(region))
    for forbidden in (start, start + page + room):
        if ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(forbidden), page, _NO_ACCESS):
            raise OSError(ctypes.get_errno(), "mprotect")
    _KEPT.append(region)
    if not num_bytes:
        return tensor.clone()
    first = page + (room - num_bytes if at_end else 0)
    whole = torch.frombuffer(region, dtype=tensor.dtype, count=tensor.numel(), offset=first)
    return whole.view(tensor.shape).copy_(tensor)
