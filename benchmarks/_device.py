"""Which device runs the cases: processor or GPU, as torch and the operating system name it."""

import platform
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final

import torch

LIBRARIES: Final = ("triton", "safetensors")  # beside torch
DEVICE: Final = "cuda" if torch.cuda.is_available() else "cpu"


@dataclass(frozen=True, slots=True)
class Device:
    """The device a case ran on; None = not known or without meaning."""

    kind: str  # "cpu" or "cuda"
    name: str
    gpu_uuid: str | None = None
    driver: str | None = None
    power_limit_w: float | None = None
    num_sms: int | None = None
    runtime: str | None = None  # libraries that the engine runs on, with their versions


def cpu_device() -> Device:
    """Describe the processor."""
    return Device(kind="cpu", name=_cpu_name(), runtime=_runtime())


def cuda_device() -> tuple[Device, str]:
    """Describe torch's current CUDA device without NVML; return it and its UUID."""
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    uuid = f"GPU-{properties.uuid}"
    device = Device(
        kind="cuda",
        name=properties.name,
        gpu_uuid=uuid,
        num_sms=properties.multi_processor_count,
        runtime=_runtime(),
    )
    return device, uuid


def _runtime() -> str:
    """Name torch and the other libraries of the engine that are installed for this process."""
    names = [f"torch {torch.__version__}"]
    for library in LIBRARIES:
        with suppress(PackageNotFoundError):
            names.append(f"{library} {version(library)}")
    return ", ".join(names)


def _cpu_name() -> str:
    """Return the processor's model where the kernel tells it, else its architecture."""
    table = Path("/proc/cpuinfo")
    if table.is_file():
        for line in table.read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.machine()
