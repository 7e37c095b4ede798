"""Where stock kernels come from: importable modules, else a folder of parts.

The folder, named by `DDTREE_BENCH_PEERS`, holds what a machine without the engines can still call::

    site/                       wheels installed by `pip install --no-deps --target`
    py/                         kernel files of SGLang and vLLM, at their paths in the wheels
    _vllm_fa3_C.abi3.so         FlashAttention-3 as vLLM builds it

Kernel files ask their engine which device they run on. Where the engine is not installed a few
stub modules answer for it, as it would on this device.
"""

import importlib
import importlib.util
import os
import sys
import types
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

import torch

from benchmarks._peer_cells import PEERS_VARIABLE

FA3_FILE: Final = "_vllm_fa3_C.abi3.so"
SGLANG_EXTEND: Final = "sglang.kernels.ops.attention.extend_attention"
VLLM_DECODE: Final = "vllm.v1.attention.ops.triton_decode_attention"


class PeerMissingError(Exception):
    """A peer is not installed here; the message says what was looked for."""


def peers_folder(environ: Mapping[str, str] = os.environ) -> Path | None:
    """Return the folder of parts, or None where none was named."""
    told = environ.get(PEERS_VARIABLE)
    if not told:
        return None
    folder = Path(told).resolve()
    if not folder.is_dir():
        raise PeerMissingError(f"{PEERS_VARIABLE}: expected a folder, got {told!r}")
    return folder


def load_flash_mla() -> Any:
    """Return FlashMLA's module."""
    return _imported("flash_mla")


def load_flashinfer_mla() -> Any:
    """Return FlashInfer's MLA module."""
    return _imported("flashinfer.mla")


def load_fa3() -> Callable[..., list[torch.Tensor]]:
    """Return FlashAttention-3's forward op, of an installed vLLM or of the folder."""
    candidates = []
    if (installed := _package_folder("vllm")) is not None:
        candidates.append(installed / "vllm_flash_attn" / FA3_FILE)
    if (folder := peers_folder()) is not None:
        candidates.append(folder / FA3_FILE)
    for path in candidates:
        if path.is_file():
            torch.ops.load_library(path)  # type: ignore[no-untyped-call]
            forward: Callable[..., list[torch.Tensor]] = torch.ops._vllm_fa3_C.fwd  # noqa: SLF001
            return forward
    looked = " or ".join(str(path) for path in candidates) or "an installed vLLM"
    raise PeerMissingError(f"fa3: expected {looked}, found none")


def load_sglang_extend() -> Any:
    """Return SGLang's module of the kernel that verifies trees."""
    return _kernel_file(SGLANG_EXTEND, _sglang_stubs)


def load_vllm_decode() -> Any:
    """Return vLLM's module of the kernel that decodes MLA."""
    return _kernel_file(VLLM_DECODE, _vllm_stubs)


def _imported(name: str) -> Any:
    """Import a module, the folder's wheels included; these come last on the path."""
    _extend_path("site")
    if not _is_importable(name.partition(".")[0]):
        raise PeerMissingError(f"{name}: expected it importable, found none")
    return importlib.import_module(name)


def _kernel_file(name: str, stubs: Callable[[], Mapping[str, types.ModuleType]]) -> Any:
    """Import one file of an engine; where the engine is absent, from the folder with stubs."""
    package = name.partition(".")[0]
    if name in sys.modules:
        return sys.modules[name]
    if _package_folder(package) is None:
        _extend_path("py")
        if not _is_importable(package):
            raise PeerMissingError(f"{name}: expected it importable, found none")
        sys.modules.update({key: stub for key, stub in stubs().items() if key not in sys.modules})
    return importlib.import_module(name)


def _extend_path(part: str) -> None:
    """Put a part of the folder last on the path, so that it replaces nothing installed."""
    folder = peers_folder()
    if folder is not None and str(folder / part) not in sys.path:
        sys.path.append(str(folder / part))
        importlib.invalidate_caches()


def _is_importable(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _package_folder(package: str) -> Path | None:
    """Return the folder of an installed package; None for a mere folder of files on the path."""
    spec = importlib.util.find_spec(package)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent


def _no(*_args: object) -> bool:
    return False


def _sglang_stubs() -> dict[str, types.ModuleType]:
    """Return what the kernel file imports from SGLang's runtime: the platform, and no overrides."""
    utils = {"is_cuda": torch.cuda.is_available, "get_device_core_count": _num_sms}
    others = ("is_hip", "is_gfx95_supported", "is_gfx1250_supported")
    return {
        "sglang.srt": _stub("sglang.srt"),
        "sglang.srt.environ": _stub("sglang.srt.environ", envs=_Unset()),
        "sglang.srt.utils": _stub("sglang.srt.utils", **dict.fromkeys(others, _no), **utils),
    }


def _vllm_stubs() -> dict[str, types.ModuleType]:
    """Return what the kernel file imports from vLLM: the platform, and Triton."""
    import triton  # noqa: PLC0415 - not everywhere
    import triton.language as tl  # noqa: PLC0415

    platform = types.SimpleNamespace(is_rocm=_no)
    return {
        "vllm.platforms": _stub("vllm.platforms", current_platform=platform),
        "vllm.triton_utils": _stub("vllm.triton_utils", tl=tl, triton=triton),
    }


def _num_sms(*_device: object) -> int:
    return int(torch.cuda.get_device_properties(0).multi_processor_count)


class _Unset:
    """Settings of which none is set."""

    def __getattr__(self, name: str) -> types.SimpleNamespace:
        return types.SimpleNamespace(get=_no)


def _stub(name: str, **attributes: object) -> types.ModuleType:
    module = types.ModuleType(name)
    vars(module).update(attributes, __path__=[])
    return module
