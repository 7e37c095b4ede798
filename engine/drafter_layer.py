"""One layer of the drafter: attention of block rows over context and block, then a gated MLP.

Full layers see the whole context; sliding layers see the keys less than a window away, counted
from each row. Rows of a block see each other in both directions, except in sliding layers of
checkpoints trained otherwise (`is_block_causal`).
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from engine.config import DrafterConfig
from engine.drafter_context import DrafterContext
from engine.layers import Rotation, SwiGlu, rms_norm, rotate_half_split, swiglu_shapes


@dataclass(frozen=True, slots=True, eq=False)
class BlockRows:
    """Where the N * S rows of a block stand."""

    seqs: Tensor  # [N * S] int64
    positions: Tensor  # [N * S] int64
    rotation: Rotation
    starts: tuple[int, ...]  # P of each sequence
    block_size: int

    def window(self, sliding_window: int | None) -> tuple[int, int]:
        """Return the half-open range of positions that some row of the block may see."""
        end = max(self.starts) + self.block_size
        if sliding_window is None:
            return 0, end
        return max(0, min(self.starts) - sliding_window + 1), end

    def mask(self, sliding_window: int | None, *, is_causal: bool) -> Tensor:
        """Return which positions of the window each row may see, [N, S, window] bool."""
        device = self.positions.device
        keys = torch.arange(*self.window(sliding_window), device=device)
        queries = self.positions.view(-1, self.block_size, 1)
        visible = keys < queries[:, :1] + self.block_size  # what is behind the block is stale
        if sliding_window is not None:
            visible = visible & ((queries - keys).abs() < sliding_window)
        if is_causal:
            visible = visible & (keys <= queries)
        return visible.expand(-1, self.block_size, -1)


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

    @property
    def sliding_window(self) -> int | None:
        """Keys a row sees, itself included; None in a layer with full attention."""
        is_sliding = self.config.layer_types[self.index] == "sliding_attention"
        return self.config.sliding_window if is_sliding else None

    def keys_and_values(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Project context or block rows `x` [M, hidden], [M, H_kv, head_dim] each."""
        shape = (len(x), self.config.num_key_value_heads, self.config.head_dim)
        keys = functional.linear(x, self.k_proj).view(shape)
        keys = rotate_half_split(rms_norm(keys, self.k_norm, self.config.rms_norm_eps), rotation)
        return keys, functional.linear(x, self.v_proj).view(shape)

    def __call__(self, x: Tensor, block: BlockRows, context: DrafterContext) -> Tensor:
        """Map the block rows `x` [N * S, hidden]; their keys stand behind the context (mutated)."""
        normed = rms_norm(x, self.input_layernorm, self.config.rms_norm_eps)
        place = (block.seqs, block.positions)
        context.write(self.index, place, self.keys_and_values(normed, block.rotation))
        x = x + functional.linear(self._attend(normed, block, context), self.o_proj)
        return x + self.mlp(rms_norm(x, self.post_attention_layernorm, self.config.rms_norm_eps))

    def _attend(self, x: Tensor, block: BlockRows, context: DrafterContext) -> Tensor:
        """Attend from the normed block rows, [N * S, H * head_dim]."""
        config, window = self.config, self.sliding_window
        first, end = block.window(window)
        is_causal = window is not None and config.is_block_causal
        mask = block.mask(window, is_causal=is_causal)  # [N, S, window]
        N, S = mask.shape[:2]
        queries = functional.linear(x, self.q_proj).view(len(x), -1, config.head_dim)
        queries = rms_norm(queries, self.q_norm, config.rms_norm_eps)
        queries = rotate_half_split(queries, block.rotation)
        # Queries of one key head share its rows: [N, H_kv, group * S, head_dim].
        grouped = queries.view(N, S, config.num_key_value_heads, -1, config.head_dim)
        group = grouped.shape[3]
        grouped = grouped.permute(0, 2, 3, 1, 4).flatten(2, 3)
        out = functional.scaled_dot_product_attention(
            grouped,
            context.keys[self.index][:, :, first:end],
            context.values[self.index][:, :, first:end],
            attn_mask=mask.repeat(1, group, 1).unsqueeze(1),
        )
        out = out.view(N, -1, group, S, config.head_dim).permute(0, 3, 1, 2, 4)
        return out.reshape(N * S, -1)


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
