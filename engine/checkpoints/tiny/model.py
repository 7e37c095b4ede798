"""Target and drafter as they are trained: batched, differentiable, the same tensors and numbers.

`target_pass` is `engine.Target.logits` for a whole batch at once, `drafter_pass` is
`engine.Drafter.draft` at many anchors of every sequence at once. Both take tensors by their
checkpoint names. They know the architecture of the tiny pair only: plain queries and one
routing group. All experts are computed for all rows and weighted, most of them by zero, which
for experts this small is faster than sorting the rows.
"""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from engine.config import DrafterConfig, TargetConfig
from engine.layers import Rotation, rms_norm, rotate_half_split, rotate_interleaved
from engine.mla import LATENT_NORM_EPS

Tensors = Mapping[str, Tensor]


class TargetPass(NamedTuple):
    """What a training pass of the target gives."""

    logits: Tensor  # [B, S, V] float32; row p is of the token at position p + 1
    taps: Tensor  # [B, S, num_taps * hidden]
    loads: Tensor  # [expert layers, E] share of all choices that fell on each expert


def target_pass(
    config: TargetConfig,
    tensors: Tensors,
    token_ids: Tensor,
    rotation: Rotation,
    tap_ids: tuple[int, ...] = (),
) -> TargetPass:
    """Run the target causally over `token_ids` [B, S]; `rotation` is of its B * S rows."""
    B, S = token_ids.shape
    x = functional.embedding(token_ids.flatten(), tensors["model.embed_tokens.weight"])
    taps, loads = [], []
    for index in range(config.num_hidden_layers):
        weights = _under(tensors, f"model.layers.{index}.")
        normed = _norm(x, weights["input_layernorm.weight"], config.rms_norm_eps)
        x = x + _latent_attention(config, weights, normed, rotation, B)
        normed = _norm(x, weights["post_attention_layernorm.weight"], config.rms_norm_eps)
        if index < config.first_k_dense_replace:
            x = x + _swiglu(normed, weights, "mlp.")
        else:
            routed, load = _experts(config, weights, normed)
            x = x + routed + _swiglu(normed, weights, "mlp.shared_experts.")
            loads.append(load)
        if index in tap_ids:
            taps.append(x)
    normed = _norm(x, tensors["model.norm.weight"], config.rms_norm_eps)
    logits = functional.linear(normed, tensors["lm_head.weight"]).float()
    tapped = torch.cat(taps, dim=-1) if taps else x[:, :0]
    return TargetPass(logits.view(B, S, -1), tapped.view(B, S, -1), torch.stack(loads))


def _latent_attention(
    config: TargetConfig, weights: Tensors, x: Tensor, rotation: Rotation, num_seqs: int
) -> Tensor:
    """Attend causally within each sequence, expanded; `x` [B * S, hidden]."""
    heads, nope, value = config.num_attention_heads, config.qk_nope_head_dim, config.v_head_dim
    rope = config.qk_rope_head_dim
    q = functional.linear(x, weights["self_attn.q_proj.weight"]).view(len(x), heads, -1)
    q_nope, q_rope = q.split([nope, rope], dim=-1)
    kv_a = functional.linear(x, weights["self_attn.kv_a_proj_with_mqa.weight"])
    c_kv, k_rope = kv_a.split([config.kv_lora_rank, rope], dim=-1)
    c_kv = _norm(c_kv, weights["self_attn.kv_a_layernorm.weight"], LATENT_NORM_EPS)
    kv = functional.linear(c_kv, weights["self_attn.kv_b_proj.weight"]).view(len(x), heads, -1)
    k_nope, values = kv.split([nope, value], dim=-1)
    k_rope = rotate_interleaved(k_rope, rotation).unsqueeze(1).expand(-1, heads, -1)
    queries = torch.cat((q_nope, rotate_interleaved(q_rope, rotation)), dim=-1)
    keys = torch.cat((k_nope, k_rope), dim=-1)
    values = functional.pad(values, (0, config.qk_head_dim - value))  # flash wants one width
    out = functional.scaled_dot_product_attention(
        *(_by_head(rows, num_seqs) for rows in (queries, keys, values)),
        is_causal=True,
        scale=config.softmax_scale,
    )
    out = out[..., :value].transpose(1, 2).reshape(len(x), -1)
    return functional.linear(out, weights["self_attn.o_proj.weight"])


def _experts(config: TargetConfig, weights: Tensors, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the weighted sum of the chosen experts of `x` [M, hidden], and the load [E]."""
    with torch.autocast(x.device.type, enabled=False):  # the engine routes in float32
        scores = functional.linear(x.float(), weights["mlp.gate.weight"].float()).sigmoid()
    priority = scores.detach() + weights["mlp.gate.e_score_correction_bias"]
    chosen = priority.topk(config.num_experts_per_tok, dim=-1).indices
    mask = torch.zeros_like(scores).scatter(1, chosen, 1.0)
    kept = scores * mask
    share = kept / kept.sum(dim=-1, keepdim=True) * config.routed_scaling_factor  # [M, E]
    gate = functional.linear(x, weights["mlp.experts.gate_proj.weight"].flatten(0, 1))
    up = functional.linear(x, weights["mlp.experts.up_proj.weight"].flatten(0, 1))
    inner = (functional.silu(gate) * up).view(len(x), config.n_routed_experts, -1)
    inner = inner * share.unsqueeze(-1).to(inner.dtype)
    down = weights["mlp.experts.down_proj.weight"].transpose(0, 1).flatten(1)  # [hidden, E * I]
    return functional.linear(inner.flatten(1), down), mask.mean(dim=0) / chosen.shape[1]


class DraftBlocks(NamedTuple):
    """Where the blocks of a batch stand: A anchors in each of B sequences of S tokens."""

    token_ids: Tensor  # [B, A, block_size]: the anchor's token, then masks
    rotation: Rotation  # of the B * A * block_size block rows
    full_mask: Tensor  # [B, 1, A * block_size, S + A * block_size] bool: what a row may see
    sliding_mask: Tensor  # the same for sliding layers


def draft_blocks(
    config: DrafterConfig, token_ids: Tensor, anchors: Tensor, table: Rotation
) -> DraftBlocks:
    """Place a block at every anchor; `table` holds the rotation of every position.

    Parameters
    ----------
    token_ids : [B, S] int64
    anchors : [B, A] int64
        Position of each block's first row, whose token is known; its context lies before it.
    """
    B, S = token_ids.shape
    A, size = anchors.shape[1], config.block_size
    offsets = torch.arange(size, device=anchors.device)
    positions = (anchors.unsqueeze(-1) + offsets).view(B, A * size, 1)
    blocks = torch.full((B, A, size), config.mask_token_id, device=anchors.device)
    blocks[:, :, 0] = token_ids.gather(1, anchors)
    context = torch.arange(S, device=anchors.device)
    sees = context < anchors.repeat_interleave(size, dim=1).unsqueeze(-1)  # [B, A * size, S]
    owner = torch.arange(A, device=anchors.device).repeat_interleave(size)
    own = (owner.unsqueeze(1) == owner).expand(B, -1, -1)
    near = (positions - context).abs() < (config.sliding_window or S + size)
    rows = positions.flatten()
    return DraftBlocks(
        token_ids=blocks,
        rotation=Rotation(table.cos[rows], table.sin[rows]),
        full_mask=torch.cat((sees, own), dim=-1).unsqueeze(1),
        sliding_mask=torch.cat((sees & near, own), dim=-1).unsqueeze(1),
    )


def drafter_pass(
    config: DrafterConfig, tensors: Tensors, taps: Tensor, rotation: Rotation, blocks: DraftBlocks
) -> Tensor:
    """Draft every block; `rotation` is of the B * S context rows.

    Parameters
    ----------
    tensors : mapping of str to Tensor
        The drafter's own, beside the target's `model.embed_tokens.weight` and `lm_head.weight`.
    taps : [B, S, num_taps * hidden]

    Returns
    -------
    Tensor
        [B, A, horizon, V] float32; depth d is the token at anchor + d.
    """
    B, A, size = blocks.token_ids.shape
    features = functional.linear(taps.flatten(0, 1), tensors["fc.weight"])
    features = _norm(features, tensors["hidden_norm.weight"], config.rms_norm_eps)
    x = functional.embedding(blocks.token_ids.flatten(), tensors["model.embed_tokens.weight"])
    for index, kind in enumerate(config.layer_types):
        weights = _under(tensors, f"layers.{index}.")
        mask = blocks.sliding_mask if kind == "sliding_attention" else blocks.full_mask
        normed = _norm(x, weights["input_layernorm.weight"], config.rms_norm_eps)
        context = _keys_and_values(config, weights, features, rotation)
        own = _keys_and_values(config, weights, normed, blocks.rotation)
        queries = _rotated_heads(config, weights, "q", normed, blocks.rotation)
        x = x + _block_attention(config, weights, queries, (context, own), mask)
        normed = _norm(x, weights["post_attention_layernorm.weight"], config.rms_norm_eps)
        x = x + _swiglu(normed, weights, "mlp.")
    drafts = x.view(B, A, size, -1)[:, :, 1:]
    normed = _norm(drafts, tensors["norm.weight"], config.rms_norm_eps)
    return functional.linear(normed, tensors["lm_head.weight"]).float()


def _block_attention(
    config: DrafterConfig,
    weights: Tensors,
    queries: Tensor,
    parts: tuple[tuple[Tensor, Tensor], ...],
    mask: Tensor,
) -> Tensor:
    """Attend from block rows to the context's and the blocks' keys under `mask`."""
    B = len(mask)
    group = config.num_attention_heads // config.num_key_value_heads
    keys, values = (
        torch.cat([_by_head(rows, B) for rows in kind], dim=2).repeat_interleave(group, dim=1)
        for kind in zip(*parts, strict=True)
    )
    out = functional.scaled_dot_product_attention(_by_head(queries, B), keys, values, mask)
    out = out.transpose(1, 2).reshape(len(queries), -1)
    return functional.linear(out, weights["self_attn.o_proj.weight"])


def _keys_and_values(
    config: DrafterConfig, weights: Tensors, x: Tensor, rotation: Rotation
) -> tuple[Tensor, Tensor]:
    values = functional.linear(x, weights["self_attn.v_proj.weight"])
    keys = _rotated_heads(config, weights, "k", x, rotation)
    return keys, values.unflatten(-1, (-1, config.head_dim))


def _rotated_heads(
    config: DrafterConfig, weights: Tensors, name: str, x: Tensor, rotation: Rotation
) -> Tensor:
    """Project `x` [M, hidden] to normed, rotated queries or keys, [M, heads, head_dim]."""
    heads = functional.linear(x, weights[f"self_attn.{name}_proj.weight"])
    heads = heads.unflatten(-1, (-1, config.head_dim))
    normed = _norm(heads, weights[f"self_attn.{name}_norm.weight"], config.rms_norm_eps)
    return rotate_half_split(normed, rotation)


def _swiglu(x: Tensor, weights: Tensors, prefix: str) -> Tensor:
    gate = functional.silu(functional.linear(x, weights[f"{prefix}gate_proj.weight"]))
    up = functional.linear(x, weights[f"{prefix}up_proj.weight"])
    return functional.linear(gate * up, weights[f"{prefix}down_proj.weight"])


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return rms_norm(x.float(), weight, eps)


def _by_head(rows: Tensor, num_seqs: int) -> Tensor:
    """Spread packed rows [B * S, heads, width] to [B, heads, S, width]."""
    return rows.unflatten(0, (num_seqs, -1)).transpose(1, 2)


def _under(tensors: Tensors, prefix: str) -> dict[str, Tensor]:
    return {name[len(prefix) :]: t for name, t in tensors.items() if name.startswith(prefix)}
