"""Checkpoints on disk: a directory with `config.json` and `.safetensors` files.

Names are those of the published checkpoints: DeepSeek-V3's for the target, also behind the Kimi
K2.5 wrapper's prefix, and DFlash's for the drafter. Projections may be stored in fp8 blocks or
packed 4-bit groups and stay so in memory. A target's routed experts lie apart on disk, or fused
as transformers holds them, and are stacked while they are read, one at a time.
This module owns the files and knows nothing about what the tensors do.
"""

import json
import re
import struct
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from engine.checkpoint_config import (
    TargetLayout,
    drafter_config,
    drafter_fields,
    target_fields,
    target_layout,
)
from engine.checkpoint_files import (
    INDEX_FILE,
    PROJECTION,
    CheckpointFiles,
    split_experts,
)
from engine.drafter import Drafter, drafter_shapes
from engine.errors import ConfigError, WeightsError
from engine.json_fields import read_fields
from engine.quantized import (
    PLAIN_DTYPES,
    Weight,
    quantization_of,
    split_parts,
)
from engine.target import Target, target_shapes

CONFIG_FILE = "config.json"
TENSOR_FILE = "model.safetensors"
MASK_FILE = "mask_embedding.pt"
MASK_TENSOR = "mask_embedding.weight"
HEAD_TENSOR = "lm_head.weight"
# What torch's reader of pickles raises on damaged ones.
_NO_PICKLE = (
    UnpicklingError,
    RuntimeError,
    EOFError,
    ValueError,
    LookupError,
    AttributeError,
    TypeError,
    struct.error,
)
_VISION = re.compile(r"(model\.)?(vision_tower|mm_projector)\.")  # of the wrapper; not the text's


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
        The configuration is of no model or no storage the engine has, or `dtype` is not of plain
        numbers.
    """
    if dtype not in PLAIN_DTYPES:
        names = ", ".join(str(known).removeprefix("torch.") for known in PLAIN_DTYPES)
        raise ConfigError(f"dtype: expected one of {names}, got {dtype!r} (of hidden states)")
    directory = Path(model_dir)
    layout = target_layout(read_fields(directory / CONFIG_FILE))
    checkpoint = CheckpointFiles(directory, partial(_target_name, layout))
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
    checkpoint = CheckpointFiles(directory)
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
        if isinstance(weight, Tensor) and (PROJECTION.search(name) or name == HEAD_TENSOR)
        for disk_name, _ in split_experts(name, weight)
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
        for disk_name, part in split_experts(name + suffix, stored)
    }
    directory.mkdir(parents=True, exist_ok=True)
    for stale in (*directory.glob("*.safetensors"), directory / INDEX_FILE, directory / MASK_FILE):
        stale.unlink(missing_ok=True)
    text = json.dumps(fields, indent=2, sort_keys=True) + "\n"
    (directory / CONFIG_FILE).write_text(text, encoding="utf-8")
    save_file(on_disk, directory / TENSOR_FILE, metadata={"format": "pt"})


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
    except _NO_PICKLE as error:
        raise WeightsError(f"{path}: expected a saved tensor, got {error!r}") from error
    if isinstance(value, dict):
        stored_id = value.get("mask_token_id", mask_token_id)
        if isinstance(stored_id, Tensor) or stored_id != mask_token_id:
            raise WeightsError(
                f"{path}: expected the embedding of mask token {mask_token_id}, got one of "
                f"{stored_id} (the configuration says so)"
            )
        value = value.get("embedding", value.get("mask_embedding"))
    is_plain = isinstance(value, Tensor) and value.dtype in PLAIN_DTYPES
    is_row = is_plain and value.layout == torch.strided and not (value.is_nested or value.is_meta)
    if not is_row or value.numel() != hidden_size:
        is_shaped = isinstance(value, Tensor) and not value.is_nested
        got = list(value.shape) if is_shaped else type(value).__name__
        raise WeightsError(
            f"{path}: expected {hidden_size} plain numbers, got {got} (one embedding)"
        )
    mask: Tensor = value.detach().flatten()  # a saved parameter would draw every draft into a graph
    return mask
