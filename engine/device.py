"""Between host and device: tensors that go up without a wait, and the wait itself."""

from collections.abc import Sequence
from contextlib import ExitStack
from functools import cache
from itertools import accumulate
from typing import Any, Self

import torch
from torch import Tensor

ALIGNMENT = 16  # bytes: the widest load of a kernel


def upload(values: Tensor, device: torch.device) -> Tensor:
    """Bring a tensor of the host to `device` without waiting for the device."""
    if device.type != "cuda" or values.device == device:
        return values.to(device)
    return _pinned(values).to(device, non_blocking=True)


def upload_into(held: Tensor, values: Tensor) -> None:
    """Overwrite `held` (mutated) with a tensor of the host, without waiting for the device."""
    held.copy_(_pinned(values) if held.is_cuda else values, non_blocking=True)


class Place:
    """Where numbers of the host always lie on a device; new ones are brought without a wait.

    They go through pinned memory of the place's own: to pin each anew is most of what it costs. It
    is waited for only if they come faster than the device takes them.
    """

    def __init__(self, values: Tensor, device: torch.device) -> None:
        self.held = torch.empty_like(values, device=device)  # on the device
        self._staged = torch.empty_like(values, pin_memory=True) if self.held.is_cuda else values
        self._is_taken: Any = None  # an event: what was staged has been read
        if self.held.is_cuda:
            self._is_taken = torch.cuda.Event()  # type: ignore[no-untyped-call]
        self.bring(values)

    def bring(self, values: Tensor) -> Tensor:
        """Overwrite `held` (mutated) with numbers of the same shape and return it."""
        if self._is_taken is None:
            return self.held.copy_(values)
        if not self._is_taken.query():
            self._is_taken.synchronize()
        self._staged.copy_(values)
        self.held.copy_(self._staged, non_blocking=True)
        self._is_taken.record(torch.cuda.current_stream(self.held.device))
        return self.held


def upload_all(values: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Bring tensors of the host to `device` as `upload` does, by one copy for all of them."""
    if device.type != "cuda":
        return [one.to(device) for one in values]
    staged = torch.empty(packed_bytes(values), dtype=torch.uint8, pin_memory=True)
    for place, one in zip(packed(staged, values), values, strict=True):
        place.copy_(one)
    return packed(staged.to(device, non_blocking=True), values)


def packed(storage: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return tensors such as `like` that lie behind each other in `storage` [bytes] uint8."""
    starts = accumulate(map(_room, like), initial=0)
    return [
        storage[start : start + one.nbytes].view(one.dtype).view(one.shape)
        for start, one in zip(starts, like, strict=False)
    ]


def packed_bytes(like: Sequence[Tensor]) -> int:
    """Return how many bytes `packed` needs."""
    return sum(map(_room, like))


class Aside:
    """What is launched within runs beside what is launched behind it, until `join`.

    It must read nothing that is launched in between, nor anything that is freed before the join.
    On a CPU all runs in order. So it does outside a graph's capture where `only_captured`: to part
    and to join costs the host more than a short product is worth, and a graph nothing.
    """

    def __init__(self, device: torch.device, *, only_captured: bool = False) -> None:
        self._device = device
        parts = device.type == "cuda"
        if parts and only_captured:
            parts = torch.cuda.is_current_stream_capturing()
        self._stream = _side_stream(device) if parts else None
        self._within = ExitStack()

    def __enter__(self) -> Self:
        """Begin behind everything that was launched before."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            self._within.enter_context(torch.cuda.stream(self._stream))
        return self

    def __exit__(self, *_: object) -> None:
        """Launch in order again, beside it."""
        self._within.close()

    def join(self) -> None:
        """Let what is launched from here on wait for it."""
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)


def wait_for(device: torch.device) -> None:
    """Wait until `device` has done all it was given; the host's work is done when it is asked."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@cache
def _side_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _pinned(values: Tensor) -> Tensor:
    """Return a copy that a device can read; `pin_memory` first asks at length whether it can."""
    return torch.empty_like(values, pin_memory=True).copy_(values)


def _room(tensor: Tensor) -> int:
    return -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
