"""The stock Triton kernels: SGLang's, which takes a tree, and vLLM's, which takes a chain.

SGLang verifies with the kernel it extends a prompt with: one program for each head and query tile
walks all committed rows. vLLM gives each tree token a row of its own in its decode kernel, so a
token can only see a length.
"""

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from benchmarks._peer_inputs import PeerInputs

PAGE_MULTIPLE: Final = 16  # vLLM's backend takes pages of so many rows
ROWS_PER_SPLIT: Final = 512  # of vLLM's backend
SPLITS_PER_SM: Final = 2
CPU_SPLITS: Final = 16


def sglang_tree(module: Any, inputs: PeerInputs) -> Callable[[], Tensor]:
    """Return the call that attends the tree.

    Source: sglang 0.5.23 srt/layers/attention/triton_backend.py (target verify).
    """
    arguments = sglang_arguments(inputs)
    out: Tensor = arguments["o_extend"].view_as(inputs.q[..., : inputs.case.value_dim])

    def call() -> Tensor:
        module.extend_attention_fwd(**arguments)
        return out

    return call


def sglang_arguments(inputs: PeerInputs) -> dict[str, Any]:
    """Return the kernel's arguments: tree rows dense, committed ones by slot, a mask a sequence."""
    cell, value_dim, device = inputs.cell, inputs.case.value_dim, inputs.q.device
    tree_rows = inputs.kv_pages.flatten(0, 1)[inputs.tree_slots.long().flatten()][:, None]
    pool = inputs.kv_pages.view(-1, 1, inputs.case.latent_dim)
    position = torch.arange(inputs.slots.shape[1], device=device)
    prefix = inputs.slots[position < inputs.context_lens[:, None]].long()
    masks, sizes = _full_masks(inputs)
    return {
        "q_extend": inputs.flat_q,
        "k_extend": tree_rows,
        "v_extend": tree_rows[..., :value_dim].contiguous(),
        "o_extend": torch.empty_like(inputs.flat_q[..., :value_dim]),
        "k_buffer": pool,
        "v_buffer": pool[..., :value_dim],
        "qo_indptr": _bounds(torch.full_like(inputs.context_lens, cell.tree_tokens)),
        "kv_indptr": _bounds(inputs.context_lens),
        "kv_indices": prefix,
        "custom_mask": masks,
        "is_causal": True,
        "mask_indptr": _bounds(sizes).long(),
        "max_len_extend": cell.tree_tokens,
        "k_scale": 1.0,
        "v_scale": 1.0,
        "sm_scale": inputs.scale,
        "page_size": cell.page_size,
    }


def _full_masks(inputs: PeerInputs) -> tuple[Tensor, Tensor]:
    """Return the masks `[T, S + T]` of all sequences end to end, and their sizes."""
    masks = [
        torch.cat([visible.new_ones(len(visible), context_len), visible], 1).flatten()
        for visible, context_len in zip(inputs.visible, inputs.cell.context_lens, strict=True)
    ]
    sizes = torch.tensor([len(mask) for mask in masks], device=inputs.q.device)
    return torch.cat(masks), sizes


def vllm_chain(module: Any, inputs: PeerInputs) -> Callable[[], Tensor]:
    """Return the call that attends a causal chain, a row for each of its tokens.

    Source: vllm 0.33.0 v1/attention/backends/mla/triton_mla.py.
    """
    arguments = vllm_arguments(inputs)
    out: Tensor = arguments["o"].view_as(inputs.q[..., : inputs.case.value_dim])

    def call() -> Tensor:
        module.decode_attention_fwd(**arguments)
        return out

    return call


def vllm_arguments(inputs: PeerInputs) -> dict[str, Any]:
    """Return the kernel's arguments: each tree token a sequence that ends with itself."""
    cell, value_dim, device = inputs.cell, inputs.case.value_dim, inputs.q.device
    q = inputs.flat_q
    num_rows, num_heads, _ = q.shape
    splits = num_splits(int(inputs.lengths.max()), device)
    pool = inputs.kv_pages.view(-1, cell.page_size, 1, inputs.case.latent_dim)
    node = torch.arange(1, cell.tree_tokens + 1, dtype=torch.int32, device=device)
    partial = (num_rows, num_heads, splits, value_dim + 1)
    one = torch.ones((), device=device)
    return {
        "q": q,
        "k_buffer": pool,
        "v_buffer": pool[..., :value_dim],
        "o": torch.zeros_like(q[..., :value_dim]),
        "lse": torch.zeros(num_rows, num_heads, dtype=q.dtype, device=device),
        "req_to_token": inputs.page_table.repeat_interleave(cell.tree_tokens, 0),
        "b_seq_len": (inputs.context_lens[:, None] + node).flatten(),
        "attn_logits": torch.empty(partial, dtype=torch.float32, device=device),
        "num_kv_splits": splits,
        "sm_scale": inputs.scale,
        "page_size": cell.page_size,
        "k_scale": one,
        "v_scale": one,
        "is_mla": True,
    }


def num_splits(longest: int, device: torch.device) -> int:
    """Return into how many parts vLLM's backend divides rows: a power of two, two an SM at most."""
    wanted = 1 << (max(1, longest // ROWS_PER_SPLIT) - 1).bit_length()
    if device.type != "cuda":
        return min(wanted, CPU_SPLITS)
    sms = int(torch.cuda.get_device_properties(device).multi_processor_count)
    return min(wanted, SPLITS_PER_SM * sms)


def _bounds(counts: Tensor) -> Tensor:
    """Return where each of so many begins, and where the last ends: `[N + 1]`, dtype of counts."""
    return torch.cat([counts.new_zeros(1), counts.cumsum(0, dtype=counts.dtype)])
