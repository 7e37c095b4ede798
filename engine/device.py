"""Between host and device: tensors that go up without a wait, and the wait itself."""

import torch
from torch import Tensor


def upload(values: Tensor, device: torch.device) -> Tensor:
    """Bring a tensor of the host to `device` without waiting for the device."""
    if device.type != "cuda" or values.device == device:
        return values.to(device)
    return values.pin_memory().to(device, non_blocking=True)


def wait_for(device: torch.device) -> None:
    """Wait until `device` has done all it was given; the host's work is done when it is asked."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
