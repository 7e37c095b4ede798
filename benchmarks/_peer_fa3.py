"""FlashAttention-3's MLA path: a causal chain, and SGLang's cascade, which takes a tree.

The op gets the latent rows split in two, the rope part as its keys and queries and the rest as
values and `q_v`; any page size. The cascade verifies a tree in three launches' worth of work:

1. all tree tokens attend the committed rows, no mask;
2. each tree token is a sequence of its own, whose pages of one row are its ancestors;
3. both are merged by their LSE.

Source: sglang 0.5.23 srt/layers/attention/flashattention_backend.py (target verify, topk > 1).
Differs: FlashAttention-3 is vLLM's build of it, and the merge is that of `_peer_merge.py`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from benchmarks._peer_inputs import PeerInputs
from benchmarks._peer_merge import merge_fa3

Forward = Callable[..., list[Tensor]]

UNUSED: Final = (
    *("k_new", "v_new", "out", "cu_seqlens_k", "cu_seqlens_k_new", "seqused_q", "kv_batch_idx"),
    *("leftpad_k", "rotary_cos", "rotary_sin", "seqlens_rotary", "q_descale", "k_descale"),
    *("v_descale", "scheduler_metadata", "pack_gqa", "s_aux", "cp_tot_seqused_k"),
)


@dataclass(frozen=True, slots=True)
class PagedRows:
    """Which rows each sequence of a call attends."""

    page_size: int
    page_table: Tensor  # [N, max_pages] int32
    lengths: Tensor  # [N] int32
    longest: int  # of the lengths, known to the host


def fa3_chain(forward: Forward, inputs: PeerInputs) -> Callable[[], Tensor]:
    """Return the call that attends a causal chain behind the committed rows."""
    rows = _all_rows(inputs, inputs.lengths)
    queries = _even_queries(inputs, inputs.cell.tree_tokens)
    arguments = fa3_arguments(inputs, rows, queries, is_causal=True)
    return lambda: forward(**arguments)[0].view_as(inputs.q[..., : inputs.case.value_dim])


def fa3_cascade(forward: Forward, inputs: PeerInputs) -> Callable[[], Tensor]:
    """Return the call that attends the tree, in two passes and a merge."""
    tree_tokens = inputs.cell.tree_tokens
    prefix = fa3_arguments(
        inputs,
        _all_rows(inputs, inputs.context_lens),
        _even_queries(inputs, tree_tokens),
        is_causal=False,
    )
    page_table, lengths = ancestor_pages(inputs.visible, inputs.tree_slots)
    tree = fa3_arguments(
        inputs,
        PagedRows(1, page_table, lengths, tree_tokens),
        _even_queries(inputs, 1),
        is_causal=False,
    )

    def call() -> Tensor:
        out, lse, *_ = forward(**prefix)
        tree_out, tree_lse, *_ = forward(**tree)
        merged = merge_fa3((out, lse), (tree_out, tree_lse))
        return merged.view_as(inputs.q[..., : inputs.case.value_dim])

    return call


def ancestor_pages(visible: Tensor, tree_slots: Tensor) -> tuple[Tensor, Tensor]:
    """Return for each tree token a page table of its ancestors' rows, and how many they are.

    Parameters
    ----------
    visible : [N, T, T] bool
        Ancestor masks.
    tree_slots : [N, T] int32
        Row numbers of the trees' tokens.

    Returns
    -------
    page_table : [N * T, T] int32
        Pages of one row, those seen first and in order of node, the others behind them.
    lengths : [N * T] int32
    """
    order = (~visible).to(torch.uint8).argsort(dim=2, stable=True)
    slots = tree_slots[:, None, :].expand(visible.shape).gather(2, order)
    return slots.flatten(0, 1).contiguous(), visible.sum(2, dtype=torch.int32).flatten()


def fa3_arguments(
    inputs: PeerInputs, rows: PagedRows, queries: dict[str, Any], *, is_causal: bool
) -> dict[str, Any]:
    """Return all arguments of the op for one pass; what it does not need is None."""
    value_dim = inputs.case.value_dim
    pool = inputs.kv_pages.view(-1, rows.page_size, 1, inputs.case.latent_dim)
    q = inputs.flat_q
    return {
        **dict.fromkeys(UNUSED),
        "q": q[..., value_dim:],
        "k": pool[..., value_dim:],
        "v": pool[..., :value_dim],
        "q_v": q[..., :value_dim],
        **queries,
        "seqused_k": rows.lengths,
        "max_seqlen_k": rows.longest,
        "page_table": rows.page_table,
        "softmax_scale": inputs.scale,
        "is_causal": is_causal,
        "window_size_left": -1,
        "window_size_right": -1,
        "softcap": 0.0,
        "is_rotary_interleaved": True,
        "num_splits": 0,  # the op's own choice
        "sm_margin": 0,
        "cp_world_size": 1,
        "cp_rank": 0,
    }


def _even_queries(inputs: PeerInputs, tokens: int) -> dict[str, Any]:
    """Return the arguments that cut the queries into sequences of so many tokens each."""
    total = len(inputs.flat_q)
    bounds = torch.arange(0, total + 1, tokens, dtype=torch.int32, device=inputs.q.device)
    return {"cu_seqlens_q": bounds, "max_seqlen_q": tokens}


def _all_rows(inputs: PeerInputs, lengths: Tensor) -> PagedRows:
    page_table = inputs.page_table.contiguous()
    return PagedRows(inputs.cell.page_size, page_table, lengths, int(lengths.max()))
