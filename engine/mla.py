"""Multi-head latent attention: absorbed over the paged cache, and naive as its slow twin.

::

    q = W_q x                          per head [q_nope ; q_rope], q_rope rotated
    [c ; k] = W_kva x                  cache row = [c_kv ; k_rope] = [RMS(c) ; rotated k]
    W_kvb, head h = [W_uk ; W_uv]      keys W_uk c_kv, values W_uv c_kv

    naive      score = scale * (q_nope . W_uk c_kv + q_rope . k_rope)     out = W_uv c_kv
    absorbed   score = scale * ([W_uk^T q_nope ; q_rope] . row)           out = W_uv sum(p c_kv)

Absorbed attention reads one row of D = kv_lora_rank + qk_rope_head_dim for all heads; that read
is `tree_attention`'s business. Source: arXiv 2412.19437 section 2.1.1.
"""

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from engine.config import TargetConfig
from engine.kernels import (
    fp8_row_bytes,
    mla_rows,
    quantize_rows,
    skinny_linear,
    tree_attention,
)
from engine.layers import (
    Rotation,
    accumulation_dtype,
    joined,
    linear,
    rms_norm,
    rotate_interleaved,
)
from engine.quantized import Weight, dense
from engine.tree_scratch import TreeScratch

LATENT_NORM_EPS = 1e-6  # of the norms inside MLA; the published model code ignores rms_norm_eps


class RowStore(Protocol):
    """What attention needs of a cache: its pages, to write rows to and to read them."""

    def layer(self, layer: int) -> Tensor:
        """Return the pages of one layer, [P, L, D], a contiguous view."""


def cached_rows(config: TargetConfig, dtype: torch.dtype, kv_dtype: str) -> tuple[torch.dtype, int]:
    """Return the dtype and the width of a cached row of a target of this dtype."""
    if kv_dtype == "fp8":
        return torch.uint8, fp8_row_bytes(config.kv_lora_rank, config.qk_rope_head_dim)
    return dtype, config.latent_dim


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """Where the M packed rows of N trees are written, and what each of them may see.

    Rows are packed sequence by sequence without padding; `padded_index` says where each of them
    lies in the `[N, T]` grid that the kernel sees, None where that grid has no padding.
    """

    cache: RowStore
    scratch: TreeScratch | None  # where the rows are written; None = in the cache
    backend: str
    rows_backend: str
    linear_backend: str
    slots: Tensor  # [M] int64, in the scratch or the cache
    padded_index: Tensor | None  # [M] int64, into N * T
    page_table: Tensor  # [N, max_pages] int32
    context_lens: Tensor  # [N] int32
    ancestor_bits: Tensor  # [N, T, W] int32
    tree_sizes: Tensor  # [N] int32

    def storage(self, layer: int) -> Tensor:
        """Return the rows of one layer that `slots` count, [S, D], a view of scratch or cache."""
        rows = self.cache.layer(layer) if self.scratch is None else self.scratch.rows[layer]
        return rows.flatten(0, 1)

    def tree_kv(self, layer: int) -> Tensor | None:
        """Return the trees' rows of one layer, [N, T, D]; None if they lie in pages."""
        if self.scratch is None:
            return None
        return self.scratch.layer(layer, *self.ancestor_bits.shape[:2])

    def pad(self, rows: Tensor) -> Tensor:
        """Spread packed `rows` [M, ...] over the grid, [N, T, ...]; padding is zero."""
        N, T, _ = self.ancestor_bits.shape
        if self.padded_index is not None:
            grid = rows.new_zeros(N * T, *rows.shape[1:])
            rows = grid.index_copy_(0, self.padded_index, rows)
        return rows.view(N, T, *rows.shape[1:])

    def pack(self, grid: Tensor) -> Tensor:
        """Undo `pad`: `grid` [N, T, ...] to [M, ...]."""
        rows = grid.flatten(0, 1)
        return rows if self.padded_index is None else rows.index_select(0, self.padded_index)


@dataclass(frozen=True, slots=True)
class Mla:
    """The attention of one target layer; tensors are named as in the checkpoint."""

    config: TargetConfig
    q_a_proj: Weight | None  # [q_lora_rank, hidden]; None where queries are not compressed
    q_a_layernorm: Tensor | None  # [q_lora_rank]
    q_proj: Weight  # [H * qk_head_dim, hidden or q_lora_rank]; `q_b_proj` where compressed
    kv_a_proj_with_mqa: Weight  # [D, hidden]
    kv_a_layernorm: Tensor  # [kv_lora_rank]
    kv_b_proj: Weight  # [H * (qk_nope_head_dim + v_head_dim), kv_lora_rank]
    o_proj: Weight  # [hidden, H * v_head_dim]

    def __call__(self, x: Tensor, rotation: Rotation, plan: AttentionPlan, layer: int) -> Tensor:
        """Write the latent rows of `x` [M, hidden] and attend, absorbed; [M, hidden]."""
        tree_kv = plan.tree_kv(layer)  # first, since it refuses trees its scratch has no room for
        queries = self._rows_and_queries(x, rotation, plan, layer)
        out, _ = tree_attention(
            plan.pad(queries),
            plan.cache.layer(layer),
            plan.page_table,
            plan.context_lens,
            plan.ancestor_bits,
            tree_sizes=plan.tree_sizes,
            softmax_scale=self.config.softmax_scale,
            value_dim=self.config.kv_lora_rank,
            tree_kv=tree_kv,
            backend=plan.backend,
        )
        latent = plan.pack(out).transpose(0, 1)  # [H, M, kv_lora]
        values = x.new_empty(len(x), self.config.num_attention_heads, self.config.v_head_dim)
        skinny_linear(
            latent, self._up_values(), out=values.transpose(0, 1), backend=plan.linear_backend
        )
        return linear(values.flatten(1), self.o_proj, backend=plan.linear_backend)

    def naive(self, x: Tensor, rotation: Rotation) -> Tensor:
        """Attend causally within `x` [S, hidden], expanded and without a cache; [S, hidden]."""
        c_kv, k_rope = _cut(self.latent_rows(x, rotation), self.config.kv_lora_rank)
        q_nope, q_rope = self.queries(x, rotation)  # [S, H, nope], [S, H, rope]
        k_nope = torch.einsum("sc,hkc->shk", c_kv, self._up_keys())
        values = torch.einsum("sc,hvc->shv", c_kv, self._up_values())
        scores = torch.einsum("qhk,shk->hqs", q_nope, k_nope)
        scores = scores + torch.einsum("qhk,sk->hqs", q_rope, k_rope)  # k_rope is all heads'
        scores = scores.to(accumulation_dtype(x.dtype)) * self.config.softmax_scale
        future = torch.ones(len(x), len(x), dtype=torch.bool, device=x.device).triu(1)
        weights = scores.masked_fill(future, -torch.inf).softmax(dim=-1).to(x.dtype)
        out = torch.einsum("hqs,shv->qhv", weights, values)
        return linear(out.flatten(1), self.o_proj)

    def queries(self, x: Tensor, rotation: Rotation) -> tuple[Tensor, Tensor]:
        """Return `q_nope` [M, H, nope] and the rotated `q_rope` [M, H, rope]."""
        q = self._up_queries(linear(x, self._first_query_proj), "reference")
        q_nope, q_rope = _cut(q, self.config.qk_nope_head_dim)
        return q_nope, rotate_interleaved(q_rope, rotation)

    @property
    def _first_query_proj(self) -> Weight:
        """What makes queries, or their compressed form, of `x`."""
        return self.q_proj if self.q_a_proj is None else self.q_a_proj

    def _down_projected(self, x: Tensor, backend: str) -> tuple[Tensor, Tensor]:
        """Return what queries are made of, and latent rows [M, D] before their norm."""
        first, second = self._first_query_proj, self.kv_a_proj_with_mqa
        both = joined(first, second)
        if both is None:
            return linear(x, first, backend=backend), linear(x, second, backend=backend)
        return _cut(linear(x, both, backend=backend), first.shape[0])

    def _up_queries(self, x: Tensor, backend: str) -> Tensor:
        """Return the queries [M, H, qk_head_dim], not rotated, of what `x` gave first."""
        if self.q_a_proj is not None:
            x = skinny_linear(
                x,
                dense(self.q_proj, x.dtype),
                norm_weight=self.q_a_layernorm,
                eps=LATENT_NORM_EPS,
                backend=backend,
            )
        return x.view(len(x), -1, self.config.qk_head_dim)

    def _rows_and_queries(
        self, x: Tensor, rotation: Rotation, plan: AttentionPlan, layer: int
    ) -> Tensor:
        """Store the latent rows of `x` and return queries against such rows, [M, H, D]."""
        config, backend = self.config, plan.linear_backend
        compressed, kv_a = self._down_projected(x, backend)
        q = self._up_queries(compressed, backend)  # [M, H, nope + rope], not rotated yet
        absorbed = q.new_empty(*q.shape[:2], config.latent_dim)
        storage, slots = plan.storage(layer), plan.slots
        is_fp8 = storage.dtype == torch.uint8
        rows = q.new_empty(len(x), config.latent_dim) if is_fp8 else storage
        mla_rows(
            kv_a,
            self.kv_a_layernorm,
            q,
            self._up_keys(),
            rotation.cos,
            rotation.sin,
            torch.arange(len(x), device=x.device) if is_fp8 else slots,
            eps=LATENT_NORM_EPS,
            rows=rows,
            out=absorbed,
            backend=plan.rows_backend,
        )
        if is_fp8:
            storage.index_copy_(0, slots, quantize_rows(rows, config.kv_lora_rank))
        return absorbed

    def latent_rows(self, x: Tensor, rotation: Rotation) -> Tensor:
        """Return the cache rows `[c_kv ; k_rope]` of `x`, [M, D]."""
        kv_a = linear(x, self.kv_a_proj_with_mqa)
        c_kv, k_rope = _cut(kv_a, self.config.kv_lora_rank)
        c_kv = rms_norm(c_kv, self.kv_a_layernorm, LATENT_NORM_EPS)
        return torch.cat((c_kv, rotate_interleaved(k_rope, rotation)), dim=-1)

    def _up_keys(self) -> Tensor:
        return self._up_projections()[:, : self.config.qk_nope_head_dim]  # W_uk [H, nope, kv_lora]

    def _up_values(self) -> Tensor:
        return self._up_projections()[:, self.config.qk_nope_head_dim :]  # W_uv [H, v, kv_lora]

    def _up_projections(self) -> Tensor:
        config = self.config
        width = config.qk_nope_head_dim + config.v_head_dim
        projections = dense(self.kv_b_proj, self.kv_a_layernorm.dtype)
        return projections.view(config.num_attention_heads, width, config.kv_lora_rank)


def _cut(x: Tensor, width: int) -> tuple[Tensor, Tensor]:
    return x[..., :width], x[..., width:]
