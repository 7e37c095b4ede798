"""Where Triton launches: on a CUDA device, or on the CPU in its interpreter.

Owns the refusals that all Triton backends share. Knows no op.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

import torch
import triton

from engine.errors import BackendError

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from torch import Tensor

_ROW_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check_device(device: torch.device, backend: str = "triton") -> None:
    """Raise BackendError where a Triton backend cannot run."""
    if device.type != "cuda" and not triton.knobs.runtime.interpret:
        raise BackendError(
            f"backend {backend}: expected CUDA tensors, got {device.type} ones (on a CPU it runs "
            "in Triton's interpreter only, chosen by TRITON_INTERPRET=1 before Triton is imported)"
        )


def check_rows(rows: Tensor, backend: str = "triton") -> None:
    """Raise BackendError for rows that a Triton backend cannot take, by device and dtype."""
    check_device(rows.device, backend)
    if rows.dtype not in _ROW_DTYPES:
        raise BackendError(
            f"backend {backend}: expected bfloat16, float16 or float32 rows, got {rows.dtype}"
        )


def check_multiplied_rows(rows: Tensor, backend: str = "triton") -> None:
    """Raise BackendError for rows that a Triton backend with matrix products cannot take."""
    check_rows(rows, backend)
    if rows.dtype == torch.bfloat16 and triton.knobs.runtime.interpret:
        raise BackendError(
            f"backend {backend}: expected float16 or float32 rows in Triton's interpreter, got "
            "bfloat16 (its dot product multiplies the bit patterns)"
        )


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make `device` the one Triton launches on."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
