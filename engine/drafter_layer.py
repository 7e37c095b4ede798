"""One layer of the drafter: attention of block rows over block and context, then a gated MLP.

Full layers see the whole context, or its last `max_context` rows; sliding layers see the keys less
than a window away, counted from each row. Rows of a block see each other in both directions,
except in sliding layers of checkpoints trained otherwise (`is_block_causal`).
Source: arXiv 2602.06036; z-lab/dflash dflash/model.py; the causal form: sgl-project/SpecForge
tests/test_utils/test_dflash_mask.py.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor

from engine.config import DrafterConfig
from engine.context_rows import ContextRows, Sight
from engine.kernels import head_rows, keep_rows
from engine.layers import (
    Rotation,
    Stream,
    SwiGlu,
    linear,
    products,
    rms_norm,
    rotate_half_split,
    swiglu_shapes,
)
from engine.whole_attention import BlockAttention


@dataclass(frozen=True, slots=True)
class LayerBackends:
    """Which implementations the rows of a block run through."""

    rows: str = "reference"  # of `add_norm`, `keep_rows`, `head_rows`, `attend_window`
    linear: str = "reference"  # of `skinny_linear`


@dataclass(frozen=True, slots=True, eq=False)
class BlockRows:
    """Where the N * S rows of a block stand and what they see; made once for all layers."""

    rotation: Rotation
    attention: Mapping[Sight, BlockAttention]
    backends: LayerBackends


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
        """Project context rows `x` [M, hidden], [M, H_kv, head_dim] each."""
        keys, values = products(x, self.k_proj, self.v_proj)
        shape = (len(x), self.config.num_key_value_heads, self.config.head_dim)
        keys = rms_norm(keys.view(shape), self.k_norm, self.config.rms_norm_eps)
        return rotate_half_split(keys, rotation), values.view(shape)

    def keep(
        self, made: Tensor, rotation: Rotation, rows: Tensor, places: Tensor, backend: str
    ) -> None:
        """Store context rows of keys and values `made` [2, M, H_kv, head_dim] in `rows` (mutated).

        `places` and `backend` are those of `keep_rows`.
        """
        keep_rows(
            made[0],
            made[1],
            self.k_norm,
            rotation.cos,
            rotation.sin,
            eps=self.config.rms_norm_eps,
            rows=rows,
            places=places,
            backend=backend,
        )

    def __call__(self, stream: Stream, block: BlockRows, rows: ContextRows) -> Stream:
        """Map the residual stream of the block rows, [N * S, hidden].

        Their keys and values are kept for this draft (mutated). What comes out is not summed yet:
        the next layer sums and normalises in one go.
        """
        eps, backends = self.config.rms_norm_eps, block.backends
        x, normed = stream.normed(self.input_layernorm, eps, backends.rows)
        attend = block.attention[rows.sights[self.index]]
        attended = attend(self._queries(normed, block, rows), rows, self.index)
        out = linear(attended, self.o_proj, backend=backends.linear)
        x, normed = Stream(x, (out,)).normed(self.post_attention_layernorm, eps, backends.rows)
        return Stream(x, (self.mlp(normed, backend=backends.linear),))

    def _queries(self, x: Tensor, block: BlockRows, rows: ContextRows) -> Tensor:
        """Return the block's queries, and keep its keys and values (mutated).

        Queries of one key head share its rows: [N, H_kv, group * S, head_dim].
        """
        made = products(x, self.q_proj, self.k_proj, self.v_proj, backend=block.backends.linear)
        queries, keys, values = (part.view(len(x), -1, self.config.head_dim) for part in made)
        return head_rows(
            queries,
            keys,
            values,
            self.q_norm,
            self.k_norm,
            block.rotation.cos,
            block.rotation.sin,
            eps=self.config.rms_norm_eps,
            block=rows.block(self.index),
            backend=block.backends.rows,
        )


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
