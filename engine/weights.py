"""Checkpoints on disk: a directory with `config.json` and `.safetensors` files.

Names are those of the published checkpoints: DeepSeek-V3's for the target, also behind the Kimi
K2.5 wrapper's prefix, and DFlash's for the drafter. Projections may be stored in fp8 blocks or
packed 4-bit groups and stay so in memory. A target's routed experts lie apart on disk, or fused
as transformers holds them, and are stacked while they are read, one at a time.
This module owns the files and knows nothing about what the tensors do.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from engine.checkpoint_config import (
    Quantization,
    TargetLayout,
    drafter_config,
    drafter_fields,
    read_fields,
    target_fields,
    target_layout,
)
from engine.drafter import Drafter, drafter_shapes
from engine.errors import WeightsError
from engine.layers import accumulation_dtype
from engine.quantized import (
    PLAIN_DTYPES,
    StoredPart,
    Weight,
    join_parts,
    quantization_of,
    split_parts,
    stored_parts,
)
from engine.target import Shape, Target, target_shapes

CONFIG_FILE = "config.json"
INDEX_FILE = "model.safetensors.index.json"
TENSOR_FILE = "model.safetensors"
MASK_FILE = "mask_embedding.pt"
MASK_TENSOR = "mask_embedding.weight"
HEAD_TENSOR = "lm_head.weight"
_STACK = ".mlp.experts."  # one tensor for all experts in memory, one for each expert on disk
_VISION = re.compile(r"(model\.)?(vision_tower|mm_projector)\.")  # of the wrapper; not the text's
_PROJECTION = re.compile(r"\.\w+_proj(_with_mqa)?\.weight$")  # what may be quantised


def load_target(
    model_dir: Path | str,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
) -> Target:
    """Load a target of the DeepSeek-V3 family, alone or inside the Kimi K2.5 wrapper.

    Parameters
    ----------
    model_dir : path
        Holds `config.json` and one or more `.safetensors` files; their index is obeyed where
        there is one.
    device
        Of the tensors in memory.
    dtype
        Of hidden states and of every tensor that is stored as plain numbers; the router's bias
        keeps at least float32. Quantised weights stay as they are stored.

    Raises
    ------
    WeightsError
        A file is missing or damaged, a tensor is missing, unknown, stored twice or of another
        shape or dtype.
    ConfigError
        The configuration is of no model or no storage the engine has.
    """
    directory = Path(model_dir)
    layout = target_layout(read_fields(directory / CONFIG_FILE))
    checkpoint = _Checkpoint(directory, partial(_target_name, layout))
    shapes = target_shapes(layout.config)
    is_headless = layout.is_tied and HEAD_TENSOR not in checkpoint.stored
    if is_headless:
        del shapes[HEAD_TENSOR]
    weights = checkpoint.read(shapes, device, dtype, layout.quantization)
    if is_headless:
        weights[HEAD_TENSOR] = weights["model.embed_tokens.weight"]
    return Target(layout.config, weights)


def load_drafter(
    model_dir: Path | str,
    target: Target,
    *,
    is_block_causal: bool | None = None,
    rope_attention_factor: float | None = None,
) -> Drafter:
    """Load a DFlash drafter for `target`, onto its device and in its dtype.

    Parameters
    ----------
    model_dir : path
        As for `load_target`; a mask embedding may lie beside the tensors.
    target : Target
        Whose tokens are drafted.
    is_block_causal
        Whether rows of a block see only earlier ones in sliding layers; None = what the
        checkpoint says.
    rope_attention_factor
        Amplitude of cos and sin; None = what the checkpoint says or, failing that, the default of
        serving stacks. Both change commit lengths only.

    Raises
    ------
    WeightsError
        As for `load_target`; a drafter's tensors are plain numbers.
    ConfigError
        The configuration is of no drafter, or of one for another target.
    """
    directory = Path(model_dir)
    fields = read_fields(directory / CONFIG_FILE)
    if "quantization_config" in fields:
        raise WeightsError(
            f"{directory / CONFIG_FILE}: expected plain tensors, got quantization_config (drafters "
            "are not quantised)"
        )
    config = drafter_config(
        fields,
        target.config,
        is_block_causal=is_block_causal,
        rope_attention_factor=rope_attention_factor,
    )
    checkpoint = _Checkpoint(directory)
    shapes = drafter_shapes(config)
    if MASK_TENSOR in checkpoint.stored:
        shapes[MASK_TENSOR] = (config.hidden_size,)
    read = checkpoint.read(shapes, target.device, target.dtype, None)
    weights = {name: weight for name, weight in read.items() if isinstance(weight, Tensor)}
    if (directory / MASK_FILE).is_file():
        mask = _read_mask(directory / MASK_FILE, config.mask_token_id, config.hidden_size)
        weights[MASK_TENSOR] = mask.to(target.device, target.dtype)
    return Drafter(config, weights, target)


def save_target(target: Target, model_dir: Path | str) -> None:
    """Write `target` as `load_target` reads it; the directory is made, its files replaced.

    Quantised weights are written as they are; a `WeightsError` says that they are of two kinds,
    which one `config.json` cannot name.
    """
    kinds = {quantization_of(weight) for weight in target.tensors.values()} - {None}
    if len(kinds) > 1:
        raise WeightsError(
            f"target: expected one kind of quantised weights, got {len(kinds)} (config.json names "
            "one)"
        )
    plain = tuple(
        disk_name.removesuffix(".weight")
        for name, weight in target.tensors.items()
        if isinstance(weight, Tensor) and (_PROJECTION.search(name) or name == HEAD_TENSOR)
        for disk_name, _ in _split(name, weight)
    )
    fields = target_fields(target.config, next(iter(kinds), None), plain)
    _save(fields, target.tensors, Path(model_dir))


def save_drafter(drafter: Drafter, model_dir: Path | str) -> None:
    """Write `drafter` as `load_drafter` reads it; the directory is made, its files replaced."""
    _save(drafter_fields(drafter.config), drafter.tensors, Path(model_dir))


def _save(fields: Mapping[str, Any], weights: Mapping[str, Weight], directory: Path) -> None:
    on_disk = {
        disk_name: part.cpu().clone(memory_format=torch.contiguous_format)
        for name, weight in weights.items()
        for suffix, stored in split_parts(weight).items()
        for disk_name, part in _split(name + suffix, stored)
    }
    directory.mkdir(parents=True, exist_ok=True)
    for stale in (*directory.glob("*.safetensors"), directory / INDEX_FILE, directory / MASK_FILE):
        stale.unlink(missing_ok=True)
    text = json.dumps(fields, indent=2, sort_keys=True) + "\n"
    (directory / CONFIG_FILE).write_text(text, encoding="utf-8")
    save_file(on_disk, directory / TENSOR_FILE, metadata={"format": "pt"})


def _split(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    if _STACK not in name:
        yield name, tensor
        return
    for expert, part in enumerate(tensor):
        yield _expert_name(name, expert), part


def _expert_name(name: str, expert: int) -> str:
    return name.replace(_STACK, f"{_STACK}{expert}.")


def _target_name(layout: TargetLayout, stored: str) -> str | None:
    """Return the name that DeepSeek-V3's checkpoints give a stored tensor, None to ignore it."""
    name = stored
    if layout.is_wrapped:
        if _VISION.match(name):
            return None
        # transformers holds `model.language_model.`, and writes layers under the name that only
        # the vision tower's have in the published files.
        name = name.replace("model.language_model.", "model.", 1)
        name = name.removeprefix("language_model.").replace("model.blocks.", "model.layers.", 1)
    end = layout.config.num_hidden_layers
    heads = tuple(f"model.layers.{end + i}." for i in range(layout.num_prediction_layers))
    is_derived = name.endswith(".rotary_emb.inv_freq")
    return None if is_derived or name.startswith(heads) else name


def _read_mask(path: Path, mask_token_id: int, hidden_size: int) -> Tensor:
    """Read a drafter's own mask embedding: a tensor, or a record with one and its token id."""
    try:
        value = torch.load(path, map_location="cpu", weights_only=True)
    except (UnpicklingError, RuntimeError, EOFError) as error:
        raise WeightsError(f"{path}: expected a saved tensor, got {error}") from error
    if isinstance(value, dict):
        if value.get("mask_token_id", mask_token_id) != mask_token_id:
            raise WeightsError(
                f"{path}: expected the embedding of mask token {mask_token_id}, got one of "
                f"{value['mask_token_id']} (the configuration says so)"
            )
        value = value.get("embedding", value.get("mask_embedding"))
    is_row = isinstance(value, Tensor) and value.dtype in PLAIN_DTYPES
    if not is_row or value.numel() != hidden_size:
        got = list(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise WeightsError(
            f"{path}: expected {hidden_size} plain numbers, got {got} (one embedding)"
        )
    mask: Tensor = value.flatten()
    return mask


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
    names = set(weight_map.values()) if isinstance(weight_map, dict) else set()
    if not names or not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise WeightsError(
            f"{directory / INDEX_FILE}: expected a weight_map to files beside it, got {weight_map}"
        )
    if missing := sorted(name for name in names if not (directory / name).is_file()):
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


class _Checkpoint:
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
        if quantization is None or not _PROJECTION.search(name):
            return None
        first = _expert_name(name, 0)
        markers = (f"{first}_scale_inv", f"{first}_packed")
        return quantization if any(marker in self.stored for marker in markers) else None

    def _sources(self, name: str, part: StoredPart) -> list[_Source]:
        """Return the tensors to fill a part from: one, or one for each expert."""
        if _STACK not in name:
            return [_Source(name + part.suffix, part.shape)]
        if not part.suffix and (fused := _fused(name, part.shape)).name in self.stored:
            return [fused]
        return [
            _Source(_expert_name(name, expert) + part.suffix, part.shape[1:], expert)
            for expert in range(part.shape[0])
        ]

    def _read_part(
        self, opened: Mapping[Path, Any], name: str, part: StoredPart, device: torch.device | str
    ) -> Tensor:
        def stored(source: _Source) -> Tensor:
            path, stored_name = self.stored[source.name]
            tensor: Tensor = opened[path].get_tensor(stored_name)
            return tensor

        sources = self._sources(name, part)
        if part.dtype is None:
            first = stored(sources[0]).dtype
            part = replace(part, dtype=first, dtypes=(first,))
        whole = torch.empty(part.shape, dtype=part.dtype, device=device)
        for source in sources:
            tensor = stored(source)
            part.check(source.name, tensor, source.shape)
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
