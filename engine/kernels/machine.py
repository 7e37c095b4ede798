"""What a launch asks of the device it runs on, with stand-ins for Triton's interpreter."""

from __future__ import annotations

from functools import cache

import torch

from engine.errors import BackendError

INTERPRETER_SMS = 8  # stands in for the number of SMs where there is no device
INTERPRETER_ARCH = 0  # and for the architecture
LEAST_CHAINED_ARCH = 90  # from which on a launch may start before the one ahead of it has ended


@cache
def arch_of(device: torch.device) -> int:
    """Architecture of a device, 90 for sm_90; a stand-in for Triton's interpreter."""
    if device.type != "cuda":
        return INTERPRETER_ARCH
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@cache
def num_sms(device: torch.device) -> int:
    """SMs of a device; a stand-in for Triton's interpreter."""
    if device.type != "cuda":
        return INTERPRETER_SMS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def chains(device: torch.device) -> bool:
    """Return whether a launch on a device may start before the one ahead of it has ended."""
    return arch_of(device) >= LEAST_CHAINED_ARCH


def check_arch(device: torch.device, archs: tuple[int, ...], what: str) -> None:
    """Raise BackendError for a device of none of the architectures; `what` was to run on it."""
    arch = arch_of(device)
    if arch not in archs:
        raise BackendError(
            f"{what}: expected a GPU of one of the architectures {archs}, got "
            f"{device.type} {arch or ''}".rstrip()
        )
