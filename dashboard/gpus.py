"""Which GPU a run measures on, and NVML's word for it.

A case must always go to the same GPU, so a run names one to its benchmarks by UUID: the first that
`CUDA_VISIBLE_DEVICES` allows, counted as NVML counts (by PCI bus). This module imports `pynvml`
where it is needed, so that commands without a GPU start without it.
"""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

VISIBLE: Final = "CUDA_VISIBLE_DEVICES"
MIG_PREFIX: Final = "MIG-"


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU; a slice of it under MIG is `visible` by a name of its own."""

    index: int  # NVML's, and nvidia-smi's
    uuid: str  # of the whole card
    visible: str  # what CUDA is told
    handle: Any  # NVML's, of the whole card


@contextmanager
def chosen_gpu(environ: Mapping[str, str]) -> Iterator[Gpu | None]:
    """Yield the GPU that a run uses while NVML is open; None without a driver or a visible GPU."""
    import pynvml  # noqa: PLC0415 - commands without a GPU start without it

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield None
        return
    try:
        yield _first_visible(pynvml, environ.get(VISIBLE))
    finally:
        pynvml.nvmlShutdown()


def _first_visible(nvml: Any, allowed: str | None) -> Gpu | None:  # noqa: ANN401 - a module
    """Return the first GPU that is allowed; a name that fits none hides the rest, as in CUDA."""
    try:
        cards = [_card(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError:
        return None
    if allowed is None:
        return cards[0] if cards else None
    name = allowed.split(",")[0].strip()
    if name.startswith(MIG_PREFIX):
        return _of_slice(nvml, name, cards)
    if name.isdecimal():
        return cards[int(name)] if int(name) < len(cards) else None
    return next((card for card in cards if name and card.uuid.startswith(name)), None)


def _card(nvml: Any, index: int) -> Gpu:  # noqa: ANN401 - a module
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    uuid = str(nvml.nvmlDeviceGetUUID(handle))
    return Gpu(index, uuid, uuid, handle)


def _of_slice(nvml: Any, name: str, cards: list[Gpu]) -> Gpu | None:  # noqa: ANN401 - a module
    """Return the card a MIG slice is part of: slices share clocks and power."""
    try:
        parent = nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(
            nvml.nvmlDeviceGetHandleByUUID(name)
        )
        uuid = str(nvml.nvmlDeviceGetUUID(parent))
    except nvml.NVMLError:
        return None
    card = next((card for card in cards if card.uuid == uuid), None)
    return None if card is None else Gpu(card.index, card.uuid, name, card.handle)
