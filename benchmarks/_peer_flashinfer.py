"""FlashInfer's MLA wrapper: a causal chain, and a cascade of two of its calls, which takes a tree.

Its plan is made before the clock runs, as one plan serves all layers of a step. Its LSE is to
base 2. The cascade is that of `_peer_fa3.py` with FlashInfer's kernel in place of
FlashAttention-3's; no engine ships it.
"""

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from benchmarks._peer_inputs import PeerInputs
from benchmarks._peer_merge import merge_flashinfer

WORKSPACE_BYTES: Final = 128 << 20  # what its documentation recommends


def flashinfer_chain(mla: Any, inputs: PeerInputs, *, backend: str) -> Callable[[], Tensor]:
    """Return the call that attends a causal chain, of backend "fa3" or "fa2"."""
    queries = _bounds([inputs.cell.tree_tokens] * inputs.cell.num_seqs)
    run = _planned(mla, inputs, backend, queries, paged_rows(inputs, inputs.lengths), causal=True)
    return lambda: run().view_as(inputs.q[..., : inputs.case.value_dim])


def flashinfer_cascade(mla: Any, inputs: PeerInputs, *, backend: str) -> Callable[[], Tensor]:
    """Return the call that attends the tree, in two passes and a merge."""
    cell = inputs.cell
    queries = _bounds([cell.tree_tokens] * cell.num_seqs)
    prefix = _planned(
        mla, inputs, backend, queries, paged_rows(inputs, inputs.context_lens), causal=False
    )
    each = _bounds([1] * len(inputs.flat_q))
    tree = _planned(mla, inputs, backend, each, ancestor_rows(inputs), causal=False)

    def call() -> Tensor:
        merged = merge_flashinfer(prefix(return_lse=True), tree(return_lse=True))
        return merged.view_as(inputs.q[..., : inputs.case.value_dim])

    return call


def paged_rows(inputs: PeerInputs, lengths: Tensor) -> dict[str, Any]:
    """Return the arguments of `plan` that name the first rows of each sequence."""
    counts = -(-lengths // inputs.cell.page_size)
    column = torch.arange(inputs.page_table.shape[1], device=lengths.device)
    return {
        "kv_indptr": _bounds(counts.tolist()),
        "kv_indices": inputs.page_table[column < counts[:, None]],
        "kv_len_arr": lengths.cpu(),
        "page_size": inputs.cell.page_size,
    }


def ancestor_rows(inputs: PeerInputs) -> dict[str, Any]:
    """Return the arguments of `plan` that name each tree token's ancestors, in pages of one row."""
    visible = inputs.visible
    slots = inputs.tree_slots[:, None, :].expand(visible.shape)
    counts = visible.sum(2, dtype=torch.int32).flatten().cpu()
    return {
        "kv_indptr": _bounds(counts.tolist()),
        "kv_indices": slots[visible],
        "kv_len_arr": counts,
        "page_size": 1,
    }


def _planned(
    mla: Any,
    inputs: PeerInputs,
    backend: str,
    queries: Tensor,
    rows: dict[str, Any],
    *,
    causal: bool,
) -> Callable[..., Any]:
    """Plan a pass and return the call that runs it."""
    value_dim, dtype = inputs.case.value_dim, inputs.q.dtype
    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.int8, device=inputs.q.device)
    wrapper = mla.BatchMLAPagedAttentionWrapper(workspace, backend=backend)
    wrapper.plan(
        qo_indptr=queries,
        **rows,
        num_heads=inputs.cell.num_heads,
        head_dim_ckv=value_dim,
        head_dim_kpe=inputs.case.rope_dim,
        causal=causal,
        sm_scale=inputs.scale,
        q_data_type=dtype,
        kv_data_type=dtype,
    )
    q = inputs.flat_q
    pool = inputs.kv_pages.view(-1, rows["page_size"], inputs.case.latent_dim)
    halves = [(rows[..., :value_dim], rows[..., value_dim:]) for rows in (q, pool)]
    return lambda **options: wrapper.run(*halves[0], *halves[1], **options)


def _bounds(counts: list[int]) -> Tensor:
    """Return where each of so many begins and the last ends: `[N + 1]` int32, on the host."""
    return torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
