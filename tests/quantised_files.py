"""Small DeepSeek-V3 checkpoints quantised by the packages that define the formats."""

import json
from types import SimpleNamespace

from compressed_tensors.compressors.pack_quantized import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Quantize

INT4_SCHEME = QuantizationScheme(
    targets=["Linear"],
    weights=QuantizationArgs(
        num_bits=4, type="int", symmetric=True, strategy="group", group_size=32
    ),
)


def int4_parts(weight):
    """The tensors compressed-tensors stores for a weight [out, in], by their suffix."""
    grouped = weight.float().unflatten(-1, (-1, 32))
    scale, _ = calculate_qparams(grouped.amin(-1), grouped.amax(-1), INT4_SCHEME.weights)
    state = {"weight": weight.bfloat16(), "weight_scale": scale.bfloat16()}
    state = PackedQuantizationCompressor.compress(state, INT4_SCHEME)
    return {name.removeprefix("weight"): tensor for name, tensor in state.items()}


def int4_dequantised(parts):
    state = {f"weight{suffix}": tensor for suffix, tensor in parts.items()}
    return PackedQuantizationCompressor.decompress(state, INT4_SCHEME)["weight"]


def fp8_parts(weight, block, scale_fmt="float"):
    """The tensors transformers stores for a weight [out, in] that `block` divides, by suffix."""
    config = SimpleNamespace(weight_block_size=block, scale_fmt=scale_fmt)
    quantised = Fp8Quantize(SimpleNamespace(quantization_config=config)).convert({"weight": weight})
    return {name.removeprefix("weight"): tensor for name, tensor in quantised.items()}


def requantise(directory, quantise, config):
    """Rewrite a plain checkpoint: `quantise(name, weight)` gives parts by suffix, or None."""
    path = directory / "model.safetensors"
    stored = {}
    for name, tensor in load_file(path).items():
        parts = quantise(name, tensor) or {"": tensor}
        stored |= {f"{name}{suffix}": part.contiguous() for suffix, part in parts.items()}
    save_file(stored, path, metadata={"format": "pt"})
    fields = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(fields | {"quantization_config": config}))
