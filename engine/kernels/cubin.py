"""CUDA C++ of this package, compiled by NVRTC at first use and launched through the driver.

Owns the way from a `.cu` file beside it to a kernel on a device. A cubin is kept on disk under the
hash of everything it depends on: source and its headers, macros, architecture, compiler version. No
`nvcc`, no step at install; without a GPU `compile_cubin` still works, so that tests can read
registers and shared memory of architectures that are not here.

The packages it needs (`cuda-bindings` and NVRTC) are the extra `cuda`.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import tempfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.errors import BackendError

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

SOURCES = Path(__file__).parent / "csrc"
_INCLUDE = re.compile(r'^#include "(.+)"$', re.MULTILINE)
CACHE_VARIABLE = "DDTREE_CUBIN_CACHE"  # folder of the cubins; else the user's cache folder


def compile_cubin(source: str, *, arch: str, macros: Mapping[str, int]) -> bytes:
    """Return the cubin of `csrc/<source>` for an architecture such as `sm_90a`, from disk if there.

    Raises
    ------
    BackendError
        The extra `cuda` is not installed, or the compiler refuses the source (its log is named).
    """
    texts = _with_headers(source)
    nvrtc, version = _compiler()
    options = [f"--gpu-architecture={arch}", "--std=c++17"]
    options += [f"--define-macro={name}={value}" for name, value in sorted(macros.items())]
    key = hashlib.sha256(repr((texts, options, version)).encode()).hexdigest()
    kept = _cache_folder() / f"{Path(source).stem}-{arch}-{key[:32]}.cubin"
    if kept.is_file():
        return kept.read_bytes()
    code = _compile(nvrtc, texts, options)
    _keep(kept, code)
    return code


def _with_headers(source: str) -> dict[str, str]:
    """Text of a source and of what it includes from beside it, by name, the source first."""
    texts: dict[str, str] = {}
    names = [source]
    while names:
        name = names.pop(0)
        if name not in texts:
            texts[name] = (SOURCES / name).read_text(encoding="utf-8")
            names += _INCLUDE.findall(texts[name])
    return texts


def _compile(nvrtc: Any, texts: dict[str, str], options: list[str]) -> bytes:
    name, *headers = texts
    program = _checked(
        nvrtc.nvrtcCreateProgram(
            texts[name].encode(),
            name.encode(),
            len(headers),
            [texts[header].encode() for header in headers],
            [header.encode() for header in headers],
        )
    )
    try:
        encoded = [option.encode() for option in options]
        (status,) = nvrtc.nvrtcCompileProgram(program, len(encoded), encoded)
        if int(status) != 0:
            log = bytes(_checked(nvrtc.nvrtcGetProgramLogSize(program)))
            _checked(nvrtc.nvrtcGetProgramLog(program, log))
            raise BackendError(
                f"{name}: expected it to compile with {' '.join(options)}, got {status.name}:\n"
                f"{log.decode(errors='replace').rstrip(chr(0)).strip()}"
            )
        code = bytes(_checked(nvrtc.nvrtcGetCUBINSize(program)))
        _checked(nvrtc.nvrtcGetCUBIN(program, code))  # the bindings write into the object
    finally:
        _checked(nvrtc.nvrtcDestroyProgram(program))
    return code


@dataclass(frozen=True, slots=True)
class Launch:
    """How a kernel is launched: blocks, threads a block, bytes of dynamic shared memory."""

    grid: tuple[int, int, int]
    num_threads: int
    shared_bytes: int = 0
    follows_early: bool = False  # may start before the kernel queued ahead of it has ended
    is_cooperative: bool = False  # all blocks run at once and may wait for each other


class CudaKernel:
    """One `extern "C"` kernel of a cubin on the current device; its argument is one struct."""

    def __init__(
        self, cubin: bytes, name: str, *, shared_bytes: int = 0, is_mostly_shared: bool = False
    ) -> None:
        """Load a kernel; `is_mostly_shared`: SMs keep as much shared memory as they can.

        An SM divides shared memory and cache anew only when it is idle: grids that are to run
        beside each other ask for the same.
        """
        from cuda.bindings import driver  # noqa: PLC0415 - only where a GPU is

        self._driver = driver
        self._library = _checked(driver.cuLibraryLoadData(cubin, [], [], 0, [], [], 0))
        self._kernel = _checked(driver.cuLibraryGetKernel(self._library, name.encode()))
        if shared_bytes:
            limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            device = _checked(driver.cuCtxGetDevice())
            _checked(driver.cuKernelSetAttribute(limit, shared_bytes, self._kernel, device))
        if is_mostly_shared:
            share = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT
            device = _checked(driver.cuCtxGetDevice())
            _checked(driver.cuKernelSetAttribute(share, 100, self._kernel, device))

    def blocks_on_sm(self, num_threads: int, shared_bytes: int) -> int:
        """Return how many blocks an SM can run at once."""
        function = self._driver.CUfunction(int(self._kernel))
        ask = self._driver.cuOccupancyMaxActiveBlocksPerMultiprocessor
        return int(_checked(ask(function, num_threads, shared_bytes)))

    def launch(self, params: ctypes.Structure, launch: Launch, stream: torch.cuda.Stream) -> None:
        """Queue one launch; `params` is copied before this returns."""
        driver = self._driver
        config = driver.CUlaunchConfig()
        config.gridDimX, config.gridDimY, config.gridDimZ = launch.grid
        config.blockDimX, config.blockDimY, config.blockDimZ = launch.num_threads, 1, 1
        config.sharedMemBytes = launch.shared_bytes
        config.hStream = stream.cuda_stream
        attributes, kind = [], driver.CUlaunchAttributeID
        if launch.follows_early:
            attributes.append(driver.CUlaunchAttribute())
            attributes[-1].id = kind.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attributes[-1].value.programmaticStreamSerializationAllowed = 1
        if launch.is_cooperative:
            attributes.append(driver.CUlaunchAttribute())
            attributes[-1].id = kind.CU_LAUNCH_ATTRIBUTE_COOPERATIVE
            attributes[-1].value.cooperative = 1
        if attributes:
            config.attrs, config.numAttrs = attributes, len(attributes)
        pointers = (ctypes.c_void_p * 1)(ctypes.addressof(params))
        kernel = driver.CUfunction(int(self._kernel))
        _checked(driver.cuLaunchKernelEx(config, kernel, ctypes.addressof(pointers), 0))


def _checked(answer: tuple[Any, ...]) -> Any:
    """Return what a call of the bindings gave, or raise the error it named."""
    status, *values = answer
    if int(status) != 0:
        raise BackendError(f"CUDA: expected success, got {status.name}")
    return values[0] if values else None


@cache
def _compiler() -> tuple[Any, tuple[int, int]]:
    """NVRTC through its bindings, and its version."""
    try:
        from cuda.bindings import nvrtc  # noqa: PLC0415 - an extra

        status, major, minor = nvrtc.nvrtcVersion()
    except (ImportError, RuntimeError) as error:
        raise BackendError(
            "CUDA kernels: expected the packages of `pip install ddtree-bench[cuda]` "
            f"(cuda-bindings and NVRTC), got {error}"
        ) from error
    _checked((status,))
    return nvrtc, (major, minor)


def _cache_folder() -> Path:
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return Path(chosen)
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "ddtree-bench" / "cubins"


def _keep(path: Path, code: bytes) -> None:
    """Write under the final name only what is complete; several processes may do so at once."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        file.write(code)
    Path(file.name).replace(path)
