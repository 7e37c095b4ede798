"""Checkpoints on disk: a directory with `config.json` and `.safetensors` files.

Names are those of the published checkpoints: DeepSeek-V3's for the target, DFlash's for the
drafter. Tensors are plain float32, bfloat16 or float16; quantised checkpoints are refused. A
target's routed experts lie apart on disk and are stacked while they are read, one at a time.
This module owns the files and knows nothing about what the tensors do.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from engine.checkpoint_config import (
    drafter_config,
    drafter_fields,
    target_config,
    target_fields,
)
from engine.drafter import Drafter, drafter_shapes
from engine.errors import WeightsError
from engine.layers import accumulation_dtype
from engine.target import Shape, Target, target_shapes

CONFIG_FILE = "config.json"
TENSOR_FILE = "model.safetensors"
PLAIN_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_STACK = ".mlp.experts."  # one tensor for all experts in memory, one for each expert on disk


def load_target(
    model_dir: Path | str,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
) -> Target:
    """Load a target of the DeepSeek-V3 family.

    Parameters
    ----------
    model_dir : path
        Holds `config.json` and one or more `.safetensors` files.
    device, dtype
        Of the tensors in memory; the router's bias keeps at least float32.

    Raises
    ------
    WeightsError
        A file is missing or damaged, a tensor is missing, unknown, quantised or of another shape.
    ConfigError
        The configuration is of no model the engine has.
    """
    directory = Path(model_dir)
    config = target_config(_read_config(directory))
    shapes = target_shapes(config)
    # Layers behind the last one are multi-token-prediction heads, which this engine has no use for.
    extra = f"model.layers.{config.num_hidden_layers}."
    return Target(config, _Checkpoint(directory, ignored=(extra,)).read(shapes, device, dtype))


def load_drafter(model_dir: Path | str, target: Target) -> Drafter:
    """Load a DFlash drafter for `target`, onto its device and in its dtype.

    Raises
    ------
    WeightsError
        As for `load_target`.
    ConfigError
        The configuration is of no drafter, or of one for another target.
    """
    directory = Path(model_dir)
    config = drafter_config(_read_config(directory), target.config)
    tensors = _Checkpoint(directory).read(drafter_shapes(config), target.device, target.dtype)
    return Drafter(config, tensors, target)


def save_target(target: Target, model_dir: Path | str) -> None:
    """Write `target` as `load_target` reads it; the directory is made, its files replaced."""
    _save(target_fields(target.config), target.tensors, Path(model_dir))


def save_drafter(drafter: Drafter, model_dir: Path | str) -> None:
    """Write `drafter` as `load_drafter` reads it; the directory is made, its files replaced."""
    _save(drafter_fields(drafter.config), drafter.tensors, Path(model_dir))


def _save(fields: Mapping[str, Any], tensors: Mapping[str, Tensor], directory: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    text = json.dumps(fields, indent=2, sort_keys=True) + "\n"
    (directory / CONFIG_FILE).write_text(text, encoding="utf-8")
    on_disk = {
        disk_name: part.cpu().clone(memory_format=torch.contiguous_format)
        for name, tensor in tensors.items()
        for disk_name, part in _split(name, tensor)
    }
    save_file(on_disk, directory / TENSOR_FILE, metadata={"format": "pt"})


def _split(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Give a tensor by its names on disk: a stack of experts one expert at a time."""
    if _STACK not in name:
        yield name, tensor
        return
    for expert, part in enumerate(tensor):
        yield _expert_name(name, expert), part


def _expert_name(name: str, expert: int) -> str:
    return name.replace(_STACK, f"{_STACK}{expert}.")


def _read_config(directory: Path) -> dict[str, Any]:
    path = directory / CONFIG_FILE
    if not path.is_file():
        raise WeightsError(f"model directory: expected a {CONFIG_FILE} in {directory}, got none")
    try:
        fields = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:  # broken JSON or broken UTF-8
        raise WeightsError(f"{path}: expected JSON, got {error}") from error
    if not isinstance(fields, dict):
        raise WeightsError(f"{path}: expected a JSON object, got {type(fields).__name__}")
    if "quantization_config" in fields:
        raise WeightsError(
            f"{path}: expected plain tensors, got quantization_config (no quantised kernels)"
        )
    return fields


class _Checkpoint:
    """The tensors of all `.safetensors` files of a directory, read one by one."""

    def __init__(self, directory: Path, *, ignored: tuple[str, ...] = ()) -> None:
        self.directory = directory
        self.files: dict[str, Path] = {}
        for path in sorted(directory.glob("*.safetensors")):
            try:
                with safe_open(path, framework="pt") as file:
                    names = list(file.keys())
            except (SafetensorError, OSError) as error:
                raise WeightsError(f"{path}: expected safetensors, got {error}") from error
            self.files |= {name: path for name in names if not name.startswith(ignored)}
        if not self.files:
            raise WeightsError(f"model directory: expected .safetensors in {directory}, got none")

    def read(
        self, shapes: Mapping[str, Shape], device: torch.device | str, dtype: torch.dtype
    ) -> dict[str, Tensor]:
        """Read exactly the tensors of `shapes`; nothing may be missing and nothing be left over."""
        wanted = {
            disk_name: shape
            for name, stacked in shapes.items()
            for disk_name, shape in _disk_shapes(name, stacked)
        }
        self._check_names(wanted)
        tensors = {}
        with ExitStack() as stack:
            paths = sorted(set(self.files.values()))
            opened = {p: stack.enter_context(safe_open(p, framework="pt")) for p in paths}
            for name, shape in shapes.items():
                is_bias = name.endswith("e_score_correction_bias")
                kept = accumulation_dtype(dtype) if is_bias else dtype
                tensors[name] = torch.empty(shape, dtype=kept, device=device)
                for disk_name, part in _split(name, tensors[name]):
                    read = opened[self.files[disk_name]].get_tensor(disk_name)
                    part.copy_(_checked(disk_name, read, wanted[disk_name]))
        return tensors

    def _check_names(self, wanted: Mapping[str, Shape]) -> None:
        missing, unknown = sorted(wanted.keys() - self.files), sorted(self.files.keys() - wanted)
        if missing or unknown:
            kind, names = ("missing", missing) if missing else ("unknown", unknown)
            raise WeightsError(
                f"{self.directory}: expected the {len(wanted)} tensors of the configuration, got "
                f"{len(names)} {kind}, {names[0]} first (a checkpoint of another model?)"
            )


def _checked(name: str, tensor: Tensor, shape: Shape) -> Tensor:
    if tuple(tensor.shape) != shape or tensor.dtype not in PLAIN_DTYPES:
        raise WeightsError(
            f"{name}: expected {list(shape)} plain numbers, got {list(tensor.shape)} "
            f"{tensor.dtype} (the configuration says so)"
        )
    return tensor


def _disk_shapes(name: str, shape: Shape) -> Iterator[tuple[str, Shape]]:
    if _STACK not in name:
        yield name, shape
        return
    for expert in range(shape[0]):
        yield _expert_name(name, expert), shape[1:]
