"""The target: embedding, MLA and expert layers, output head; a paged pass and a plain one.

`forward` runs the packed rows of a batch of trees over the paged cache and captures taps;
`logits` is its slow twin: one sequence, causal, expanded attention, no cache. The target knows
nothing about drafting, sampling or who owns the cache. Tensors keep their checkpoint names,
except that the routed experts of a layer are stacked under one name.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from numbers import Integral
from typing import Any, TypeGuard

import torch
from torch import Tensor

from engine.config import TargetConfig
from engine.device import upload
from engine.errors import RequestError
from engine.layers import (
    Rotary,
    Rotation,
    Stream,
    SwiGlu,
    behind_each_other,
    linear,
    rms_norm,
    swiglu_shapes,
)
from engine.mla import AttentionPlan, Mla
from engine.moe import Moe, Router
from engine.quantized import Weight, plain

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class PassRows:
    """The M packed rows of N trees, ready for the target; tensors are on its device."""

    token_ids: Tensor  # [M] int64
    positions: Tensor  # [M] int64, absolute
    attention: AttentionPlan
    moe_backend: str
    tree_sizes: tuple[int, ...]

    @property
    def offsets(self) -> tuple[int, ...]:
        """Packed row of each tree's root."""
        starts = [0]
        for size in self.tree_sizes[:-1]:
            starts.append(starts[-1] + size)
        return tuple(starts)

    def repeat(self, values: Sequence[int]) -> Tensor:
        """Repeat one value of each sequence for all rows of its tree, [M] int64."""
        repeats = torch.tensor(self.tree_sizes)
        return upload(torch.tensor(values).repeat_interleave(repeats), self.token_ids.device)


@dataclass(frozen=True, slots=True, eq=False)
class TargetRows:
    """What a target pass gives for its M rows: the final hidden states and the taps."""

    hidden: Tensor  # [M, hidden], normalised, as the head reads them
    taps: Tensor  # [M, num_taps * hidden], column blocks in the order of the tapped layers


@dataclass(frozen=True, slots=True, eq=False)
class TargetLayer:
    """One decoder layer: attention and MLP, each normalised before and added after."""

    index: int
    eps: float
    input_layernorm: Tensor  # [hidden]
    self_attn: Mla
    post_attention_layernorm: Tensor  # [hidden]
    mlp: Moe | SwiGlu

    def paged(self, stream: Stream, rotation: Rotation, rows: PassRows) -> tuple[Tensor, Stream]:
        """Return the residual stream of the packed rows before this layer, [M, hidden], and after.

        What comes after is not summed yet: the next layer sums and normalises in one go.
        """
        plan = rows.attention
        before, normed = stream.normed(self.input_layernorm, self.eps, plan.rows_backend)
        attended = Stream(before, (self.self_attn(normed, rotation, plan, self.index),))
        weight = self.post_attention_layernorm
        x, normed = attended.normed(weight, self.eps, plan.rows_backend)
        if not isinstance(self.mlp, Moe):
            return before, Stream(x, (self.mlp(normed, backend=plan.linear_backend),))
        parts = self.mlp.parts(normed, backend=rows.moe_backend, linear_backend=plan.linear_backend)
        return before, Stream(x, parts)

    def naive(self, x: Tensor, rotation: Rotation) -> Tensor:
        """Map one whole sequence `x` [S, hidden] to the residual stream after this layer."""
        x = x + self.self_attn.naive(rms_norm(x, self.input_layernorm, self.eps), rotation)
        return x + self.mlp(rms_norm(x, self.post_attention_layernorm, self.eps))


class Target:
    """A target model over the tensors of a checkpoint.

    Parameters
    ----------
    config : TargetConfig
    tensors : mapping of str to Weight
        As `target_shapes` names them, all on one device; projections (`*_proj*`) may be
        quantised. Kept and never mutated; plain matrices that multiply the same rows are copied
        behind each other, `tensors` then are views of these copies.

    Raises
    ------
    WeightsError
        Anything but a projection is quantised.
    """

    def __init__(self, config: TargetConfig, tensors: Mapping[str, Weight]) -> None:
        self.config = config
        self.tensors = tensors = behind_each_other(tensors, _joined_names(config))
        self.embed_tokens = plain(tensors, "model.embed_tokens.weight")  # [V, hidden]
        self.norm = plain(tensors, "model.norm.weight")
        self.lm_head = plain(tensors, "lm_head.weight")  # [V, hidden]
        self.rotary = Rotary.of_target(config, self.device)
        self.layers = tuple(
            _read_layer(config, tensors, index) for index in range(config.num_hidden_layers)
        )

    @property
    def device(self) -> torch.device:
        """Where the tensors are."""
        return self.embed_tokens.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of hidden states and cache rows."""
        return self.embed_tokens.dtype

    def forward(self, rows: PassRows, tap_ids: Sequence[int]) -> TargetRows:
        """Run packed rows over the paged cache, writing their latent rows.

        Parameters
        ----------
        rows : PassRows
            The cache of its plan is mutated.
        tap_ids : sequence of int
            0-based layers, ascending; a tap is the residual stream after its layer.
        """
        stream = Stream(self.embed_tokens[rows.token_ids])
        rotation = self.rotary.at(rows.positions, self.dtype)
        taps = []
        for layer in self.layers:
            before, stream = layer.paged(stream, rotation, rows)
            if layer.index - 1 in tap_ids:
                taps.append(before)
        eps, backend = self.config.rms_norm_eps, rows.attention.rows_backend
        last, hidden = stream.normed(self.norm, eps, backend)
        if len(self.layers) - 1 in tap_ids:
            taps.append(last)
        return TargetRows(hidden, torch.cat(taps, dim=-1) if taps else hidden[:, :0])

    def head(self, hidden: Tensor) -> Tensor:
        """Return the logits of hidden states as `forward` gives them, [M, V] float32."""
        return linear(hidden, self.lm_head).float()

    def logits(self, token_ids: Sequence[int] | Tensor) -> Tensor:
        """Return the logits after every token of one sequence by a plain causal forward.

        Parameters
        ----------
        token_ids : [S] integer tensor, or a sequence of int

        Returns
        -------
        Tensor
            [S, V] float32 on the target's device. Time and memory grow with S * S.

        Raises
        ------
        RequestError
            A token is no integer or outside the vocabulary, or there is none.
        """
        if isinstance(token_ids, Tensor):
            if token_ids.dim() != 1:
                raise RequestError(
                    f"prompt: expected token ids [S], got shape {list(token_ids.shape)} (one "
                    "sequence at a time)"
                )
            token_ids = token_ids.tolist()
        check_tokens(token_ids, self.config.vocab_size)
        positions = torch.arange(len(token_ids), device=self.device)
        rotation = self.rotary.at(positions, self.dtype)
        x = self.embed_tokens[torch.tensor(token_ids, device=self.device)]
        for layer in self.layers:
            x = layer.naive(x, rotation)
        return self.head(rms_norm(x, self.norm, self.config.rms_norm_eps))


def check_tokens(token_ids: object, vocab_size: int) -> None:
    """Refuse a prompt that is empty, no integers or outside the vocabulary: `RequestError`."""
    if not is_list(token_ids):
        raise RequestError(
            f"prompt: expected token ids, got {token_ids!r} (a list or an array of them, in order)"
        )
    if len(token_ids) == 0:
        raise RequestError("prompt: expected at least one token, got none (a step needs a root)")
    for token in token_ids:
        if isinstance(token, bool) or not isinstance(token, Integral):
            raise RequestError(
                f"prompt: expected integer token ids, got {token!r} of type "
                f"{type(token).__name__} (a token is an index into the vocabulary)"
            )
    outside = [token for token in token_ids if not 0 <= token < vocab_size]
    if outside:
        raise RequestError(
            f"prompt: expected token ids in 0..{vocab_size - 1}, got {outside[0]} "
            "(the target's vocabulary)"
        )


def is_list(value: object) -> TypeGuard[Collection[Any]]:
    """Return whether a value has a number of members in an order: no set, array of none or text."""
    is_other = isinstance(value, str | AbstractSet | Mapping) or getattr(value, "ndim", 1) == 0
    return isinstance(value, Collection) and not is_other


def target_shapes(config: TargetConfig) -> dict[str, Shape]:
    """Return the shape of every tensor of a target by its name, experts stacked."""
    hidden, vocab = config.hidden_size, config.vocab_size
    shapes: dict[str, Shape] = {
        "model.embed_tokens.weight": (vocab, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocab, hidden),
    }
    for layer in range(config.num_hidden_layers):
        parts = _attention_shapes(config) | _mlp_shapes(config, layer)
        shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in parts.items()}
    return shapes


def _attention_shapes(config: TargetConfig) -> dict[str, Shape]:
    hidden, heads = config.hidden_size, config.num_attention_heads
    up = config.qk_nope_head_dim + config.v_head_dim
    shapes: dict[str, Shape] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.kv_a_proj_with_mqa.weight": (config.latent_dim, hidden),
        "self_attn.kv_a_layernorm.weight": (config.kv_lora_rank,),
        "self_attn.kv_b_proj.weight": (heads * up, config.kv_lora_rank),
        "self_attn.o_proj.weight": (hidden, heads * config.v_head_dim),
    }
    if config.q_lora_rank is None:
        return shapes | {"self_attn.q_proj.weight": (heads * config.qk_head_dim, hidden)}
    return shapes | {
        "self_attn.q_a_proj.weight": (config.q_lora_rank, hidden),
        "self_attn.q_a_layernorm.weight": (config.q_lora_rank,),
        "self_attn.q_b_proj.weight": (heads * config.qk_head_dim, config.q_lora_rank),
    }


def _mlp_shapes(config: TargetConfig, layer: int) -> dict[str, Shape]:
    hidden, inner = config.hidden_size, config.moe_intermediate_size
    if layer < config.first_k_dense_replace:
        dense = swiglu_shapes(hidden, config.intermediate_size)
        return {f"mlp.{name}.weight": shape for name, shape in dense.items()}
    experts = config.n_routed_experts
    shapes: dict[str, Shape] = {
        "mlp.gate.weight": (experts, hidden),
        "mlp.gate.e_score_correction_bias": (experts,),
    }
    for name, shape in swiglu_shapes(hidden, inner).items():
        shapes[f"mlp.experts.{name}.weight"] = (experts, *shape)
    if config.n_shared_experts:
        shared = swiglu_shapes(hidden, inner * config.n_shared_experts)
        shapes |= {f"mlp.shared_experts.{name}.weight": shape for name, shape in shared.items()}
    return shapes


def _joined_names(config: TargetConfig) -> Iterator[list[str]]:
    """Name the matrices that multiply the same rows, group by group."""
    first = "q_proj" if config.q_lora_rank is None else "q_a_proj"
    gated = ("gate_proj", "up_proj")
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}"
        yield [f"{prefix}.self_attn.{name}.weight" for name in (first, "kv_a_proj_with_mqa")]
        if layer < config.first_k_dense_replace:
            yield [f"{prefix}.mlp.{name}.weight" for name in gated]
        elif config.n_shared_experts:
            shared = [f"{prefix}.mlp.shared_experts.{name}.weight" for name in gated]
            yield [f"{prefix}.mlp.gate.weight", *shared]


def _read_layer(config: TargetConfig, tensors: Mapping[str, Weight], index: int) -> TargetLayer:
    prefix = f"model.layers.{index}"
    return TargetLayer(
        index=index,
        eps=config.rms_norm_eps,
        input_layernorm=plain(tensors, f"{prefix}.input_layernorm.weight"),
        self_attn=_read_attention(config, tensors, f"{prefix}.self_attn"),
        post_attention_layernorm=plain(tensors, f"{prefix}.post_attention_layernorm.weight"),
        mlp=_read_mlp(config, tensors, index),
    )


def _read_attention(config: TargetConfig, tensors: Mapping[str, Weight], prefix: str) -> Mla:
    is_compressed = config.q_lora_rank is not None
    return Mla(
        config=config,
        q_a_proj=tensors[f"{prefix}.q_a_proj.weight"] if is_compressed else None,
        q_a_layernorm=plain(tensors, f"{prefix}.q_a_layernorm.weight") if is_compressed else None,
        q_proj=tensors[f"{prefix}.{'q_b_proj' if is_compressed else 'q_proj'}.weight"],
        kv_a_proj_with_mqa=tensors[f"{prefix}.kv_a_proj_with_mqa.weight"],
        kv_a_layernorm=plain(tensors, f"{prefix}.kv_a_layernorm.weight"),
        kv_b_proj=tensors[f"{prefix}.kv_b_proj.weight"],
        o_proj=tensors[f"{prefix}.o_proj.weight"],
    )


def _read_mlp(config: TargetConfig, tensors: Mapping[str, Weight], index: int) -> Moe | SwiGlu:
    prefix = f"model.layers.{index}.mlp"
    if index < config.first_k_dense_replace:
        return SwiGlu.read(tensors, prefix)
    has_shared = config.n_shared_experts > 0
    return Moe(
        router=Router(
            config,
            weight=plain(tensors, f"{prefix}.gate.weight"),
            e_score_correction_bias=plain(tensors, f"{prefix}.gate.e_score_correction_bias"),
        ),
        gate_proj=tensors[f"{prefix}.experts.gate_proj.weight"],
        up_proj=tensors[f"{prefix}.experts.up_proj.weight"],
        down_proj=tensors[f"{prefix}.experts.down_proj.weight"],
        shared=SwiGlu.read(tensors, f"{prefix}.shared_experts") if has_shared else None,
    )
