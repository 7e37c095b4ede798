"""One layer of the drafter: attention of block rows over block and context, then a gated MLP.

Full layers see the whole context, or its last `max_context` rows; sliding layers see the keys less
than a window away, counted from each row. Rows of a block see each other in both directions,
except in sliding layers of checkpoints trained otherwise (`is_block_causal`).
Source: arXiv 2602.06036; z-lab/dflash dflash/model.py; the causal form: sgl-project/SpecForge
tests/test_utils/test_dflash_mask.py.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional

from engine.config import DrafterConfig
from engine.context_rows import ContextRows, Sight
from engine.layers import Rotation, SwiGlu, products, rms_norm, rotate_half_split, swiglu_shapes
from engine.whole_attention import BlockAttention


@dataclass(frozen=True, slots=True, eq=False)
class BlockRows:
    """Where the N * S rows of a block stand and what they see; made once for all layers."""

    rotation: Rotation
    attention: Mapping[Sight, BlockAttention]


@dataclass(frozen=True, slots=True, eq=False)
class DrafterLayer:
    """One layer: attention over context and block, then a gated MLP."""

    config: DrafterConfig
    index: int
    input_layernorm: Tensor
    q_proj: Tensor  # [H * head_dim, hidden]
    k_proj: Tensor  # [H_kv * head_dim, hidden]; context rows and block rows alike
    v_proj: Tensor
    o_proj: Tensor  # [hidden, H * head_dim]
    q_norm: Tensor  # [head_dim]
    k_norm: Tensor
    post_attention_layernorm: Tensor
    mlp: SwiGlu

    def keys_and_values(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Project context or block rows `x` [M, hidden], [M, H_kv, head_dim] each."""
        return self._keys_and_values(products(x, self.k_proj, self.v_proj), rotation)

    def _keys_and_values(self, made: Sequence[Tensor], rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Return keys, normed and rotated, and values, [M, H_kv, head_dim], of two products."""
        keys, values = made
        shape = (len(keys), self.config.num_key_value_heads, self.config.head_dim)
        keys = rms_norm(keys.view(shape), self.k_norm, self.config.rms_norm_eps)
        return rotate_half_split(keys, rotation), values.view(shape)

    def __call__(self, x: Tensor, block: BlockRows, rows: ContextRows) -> Tensor:
        """Map the block rows `x` [N * S, hidden]; their keys are kept for this draft (mutated)."""
        normed = rms_norm(x, self.input_layernorm, self.config.rms_norm_eps)
        queries, *others = products(normed, self.q_proj, self.k_proj, self.v_proj)
        rows.write_block(self.index, *self._keys_and_values(others, block.rotation))
        x = x + functional.linear(self._attend(queries, block, rows), self.o_proj)
        return x + self.mlp(rms_norm(x, self.post_attention_layernorm, self.config.rms_norm_eps))

    def _attend(self, queries: Tensor, block: BlockRows, rows: ContextRows) -> Tensor:
        """Attend from the queries of the block's rows, like them [N * S, H * head_dim]."""
        config = self.config
        group = config.num_attention_heads // config.num_key_value_heads
        N, S, heads = rows.num_seqs, config.block_size, config.num_key_value_heads
        queries = queries.view(N * S, config.num_attention_heads, config.head_dim)
        queries = rms_norm(queries, self.q_norm, config.rms_norm_eps)
        queries = rotate_half_split(queries, block.rotation)
        # Queries of one key head share its rows: [N, H_kv, group * S, head_dim].
        grouped = queries.view(N, S, heads, group, config.head_dim).permute(0, 2, 3, 1, 4)
        attention = block.attention[rows.sights[self.index]]
        out = attention(grouped.flatten(2, 3), rows, self.index)
        return out.view(grouped.shape).permute(0, 3, 1, 2, 4).reshape(N * S, -1)


def drafter_layer_shapes(config: DrafterConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of a layer by its name, without the layer's prefix."""
    hidden, width = config.hidden_size, config.head_dim
    query_width = config.num_attention_heads * width
    key_width = config.num_key_value_heads * width
    mlp = swiglu_shapes(hidden, config.intermediate_size)
    return {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (query_width, hidden),
        "self_attn.k_proj.weight": (key_width, hidden),
        "self_attn.v_proj.weight": (key_width, hidden),
        "self_attn.o_proj.weight": (hidden, query_width),
        "self_attn.q_norm.weight": (width,),
        "self_attn.k_norm.weight": (width,),
        "post_attention_layernorm.weight": (hidden,),
    } | {f"mlp.{name}.weight": shape for name, shape in mlp.items()}


def joined_names(config: DrafterConfig) -> Iterator[list[str]]:
    """Name the matrices that multiply the same block rows, group by group."""
    for index in range(config.num_hidden_layers):
        yield [f"layers.{index}.self_attn.{name}_proj.weight" for name in ("q", "k", "v")]
        yield [f"layers.{index}.mlp.{name}_proj.weight" for name in ("gate", "up")]


def read_drafter_layer(
    config: DrafterConfig, tensors: Mapping[str, Tensor], index: int
) -> DrafterLayer:
    """Take the tensors of layer `index` from a checkpoint's."""
    prefix = f"layers.{index}"
    attention = f"{prefix}.self_attn"
    return DrafterLayer(
        config=config,
        index=index,
        input_layernorm=tensors[f"{prefix}.input_layernorm.weight"],
        q_proj=tensors[f"{attention}.q_proj.weight"],
        k_proj=tensors[f"{attention}.k_proj.weight"],
        v_proj=tensors[f"{attention}.v_proj.weight"],
        o_proj=tensors[f"{attention}.o_proj.weight"],
        q_norm=tensors[f"{attention}.q_norm.weight"],
        k_norm=tensors[f"{attention}.k_norm.weight"],
        post_attention_layernorm=tensors[f"{prefix}.post_attention_layernorm.weight"],
        mlp=SwiGlu.read(tensors, f"{prefix}.mlp"),
    )
