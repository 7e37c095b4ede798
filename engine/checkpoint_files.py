"""The tensors of a checkpoint's `.safetensors` files, read one by one into whole weights.

A weight is one stored tensor or several: values and their scales, one for each expert, or rows of
a tensor that holds two projections. Which files belong to a checkpoint is said by their index.
This module knows how names lead to tensors and nothing about models.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from engine.checkpoint_config import Quantization
from engine.errors import WeightsError
from engine.json_fields import read_fields
from engine.layers import accumulation_dtype
from engine.quantized import StoredPart, Weight, join_parts, stored_parts
from engine.target import Shape

INDEX_FILE = "model.safetensors.index.json"
STACK = ".mlp.experts."  # one tensor for all experts in memory, one for each expert on disk
PROJECTION = re.compile(r"\.\w+_proj(_with_mqa)?\.weight$")  # what may be quantised


def split_experts(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Give a tensor by its names on disk: a stack of experts one expert at a time."""
    if STACK not in name:
        yield name, tensor
        return
    for expert, part in enumerate(tensor):
        yield expert_name(name, expert), part


def expert_name(name: str, expert: int) -> str:
    """Return the name on disk of one expert of a stack."""
    return name.replace(STACK, f"{STACK}{expert}.")


def _stored_names(path: Path) -> list[str]:
    """Return the names of a file's tensors; those without elements hold nothing."""
    try:
        with safe_open(path, framework="pt") as file:
            names: list[str] = list(file.keys())
            return [name for name in names if 0 not in file.get_slice(name).get_shape()]
    except (SafetensorError, OSError) as error:
        raise WeightsError(f"{path}: expected safetensors, got {error}") from error


def _index_files(directory: Path) -> list[Path]:
    """Return the tensor files of a directory: those its index names, or all."""
    if not (directory / INDEX_FILE).is_file():
        return sorted(directory.glob("*.safetensors"))
    weight_map = read_fields(directory / INDEX_FILE).get("weight_map")
    entries = list(weight_map.values()) if isinstance(weight_map, dict) else []
    if not entries or not all(isinstance(n, str) and Path(n).name == n for n in entries):
        raise WeightsError(
            f"{directory / INDEX_FILE}: expected a weight_map to files beside it, got {weight_map}"
        )
    names, there = set(entries), {path.name for path in directory.iterdir() if path.is_file()}
    if missing := sorted(names - there):
        raise WeightsError(
            f"{directory}: expected the {len(names)} files of {INDEX_FILE}, got {len(missing)} "
            f"missing, {missing[0]} first (an incomplete download?)"
        )
    return [directory / name for name in sorted(names)]


def _kept_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    return accumulation_dtype(dtype) if name.endswith("e_score_correction_bias") else dtype


@dataclass(frozen=True, slots=True)
class _Source:
    """A stored tensor, or rows of each expert in it, and the expert it is of."""

    name: str
    shape: Shape
    expert: int | None = None
    rows: slice | None = None


def _fused(name: str, shape: Shape) -> _Source:
    """Return where a stack of experts lies if they are fused, gate and up in one tensor."""
    prefix, kind = name.removesuffix(".weight").rsplit(".", 1)
    if kind == "down_proj":
        return _Source(f"{prefix}.down_proj", shape)
    size = shape[1]
    rows = slice(0, size) if kind == "gate_proj" else slice(size, 2 * size)
    return _Source(f"{prefix}.gate_up_proj", (shape[0], 2 * size, shape[2]), rows=rows)


class CheckpointFiles:
    """The tensors of the `.safetensors` files of a directory, read one by one."""

    def __init__(
        self, directory: Path, rename: Callable[[str], str | None] = lambda name: name
    ) -> None:
        self.directory = directory
        self.stored: dict[str, tuple[Path, str]] = {}  # by the name that `rename` gives
        paths = _index_files(directory)
        for path in paths:
            for name in _stored_names(path):
                known = rename(name)
                if known in self.stored:
                    first = self.stored[known][0].name
                    raise WeightsError(
                        f"{directory}: expected {known} once, got it in {first} and {path.name} "
                        "(which of them holds?)"
                    )
                if known is not None:
                    self.stored[known] = (path, name)
        if not paths:
            raise WeightsError(f"model directory: expected .safetensors in {directory}, got none")

    def read(
        self,
        shapes: Mapping[str, Shape],
        device: torch.device | str,
        dtype: torch.dtype,
        quantization: Quantization | None,
    ) -> dict[str, Weight]:
        """Read exactly the weights of `shapes`; nothing may be missing and nothing be left over."""
        forms = {name: self._form(name, quantization) for name in shapes}
        parts = {
            name: stored_parts(shape, forms[name], _kept_dtype(name, dtype))
            for name, shape in shapes.items()
        }
        self._check_names(
            source.name
            for name in shapes
            for part in parts[name]
            for source in self._sources(name, part)
        )
        with ExitStack() as stack:
            paths = sorted({path for path, _ in self.stored.values()})
            opened = {p: stack.enter_context(safe_open(p, framework="pt")) for p in paths}
            return {
                name: join_parts(
                    [self._read_part(opened, name, part, device) for part in parts[name]],
                    forms[name],
                )
                for name in shapes
            }

    def _form(self, name: str, quantization: Quantization | None) -> Quantization | None:
        """Return how a weight is stored: which of its tensors are there tells."""
        if quantization is None or not PROJECTION.search(name):
            return None
        first = expert_name(name, 0)
        markers = (f"{first}_scale_inv", f"{first}_packed")
        return quantization if any(marker in self.stored for marker in markers) else None

    def _sources(self, name: str, part: StoredPart) -> list[_Source]:
        """Return the tensors to fill a part from: one, or one for each expert."""
        if STACK not in name:
            return [_Source(name + part.suffix, part.shape)]
        if not part.suffix and (fused := _fused(name, part.shape)).name in self.stored:
            return [fused]
        if part.shape[0] > len(self.stored):
            raise WeightsError(
                f"{self.directory}: expected {name} of {part.shape[0]} experts, got "
                f"{len(self.stored)} tensors in all (a checkpoint of another model?)"
            )
        return [
            _Source(expert_name(name, expert) + part.suffix, part.shape[1:], expert)
            for expert in range(part.shape[0])
        ]

    def _read_part(
        self, opened: Mapping[Path, Any], name: str, part: StoredPart, device: torch.device | str
    ) -> Tensor:
        def stored(source: _Source) -> Tensor:
            path, stored_name = self.stored[source.name]
            tensor: Tensor = opened[path].get_tensor(stored_name)
            return tensor

        whole = torch.empty(0)
        for number, source in enumerate(self._sources(name, part)):
            tensor = stored(source)
            part.check(source.name, tensor, source.shape)
            if number == 0:  # room is made for what is there, not for what a configuration says
                dtype = part.dtype or tensor.dtype
                part = part if part.dtype else replace(part, dtypes=(dtype,))
                whole = torch.empty(part.shape, dtype=dtype, device=device)
            place = whole if source.expert is None else whole[source.expert]
            place.copy_(tensor if source.rows is None else tensor[:, source.rows])
        return whole

    def _check_names(self, names: Iterable[str]) -> None:
        wanted = set(names)
        missing, unknown = sorted(wanted - self.stored.keys()), sorted(self.stored.keys() - wanted)
        if missing or unknown:
            kind, which = ("missing", missing) if missing else ("unknown", unknown)
            raise WeightsError(
                f"{self.directory}: expected the {len(wanted)} tensors of the configuration, got "
                f"{len(which)} {kind}, {which[0]} first (a checkpoint of another model, or of "
                "another storage?)"
            )
