"""Stand-ins for stock kernels, in plain PyTorch: the same calls, checked as strictly as theirs.

FlashAttention-3's stands behind the schema of the real op, so that torch refuses an argument that
is missing, unknown or of the wrong type. The others repeat the signatures of the libraries and what
they demand: dtypes, where a tensor lies, contiguous last dims, the only page size.
"""

import itertools
import math

import torch

# Source: the op's registration in vllm 0.33.0, _vllm_fa3_C.abi3.so.
FA3_SCHEMA = (
    "fwd(Tensor(a!) q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, "
    "Tensor(b!)? out, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, "
    "Tensor? seqused_q, Tensor? seqused_k, int? max_seqlen_q, int? max_seqlen_k, "
    "Tensor? page_table, Tensor? kv_batch_idx, Tensor? leftpad_k, Tensor? rotary_cos, "
    "Tensor? rotary_sin, Tensor? seqlens_rotary, Tensor? q_descale, Tensor? k_descale, "
    "Tensor? v_descale, float softmax_scale, bool is_causal, int window_size_left, "
    "int window_size_right, float softcap, bool is_rotary_interleaved, "
    "Tensor? scheduler_metadata, int num_splits, bool? pack_gqa, int sm_margin, Tensor? s_aux, "
    "int cp_world_size, int cp_rank, Tensor? cp_tot_seqused_k) -> Tensor[]"
)


def attend(q, rows, value_dim, *, scale, is_causal):
    """Attention of `[M, H, D]` over `[S, D]`, causal ones ending together: out and natural LSE."""
    scores = torch.einsum("mhd,sd->mhs", q, rows) * scale
    if is_causal:
        last = torch.arange(len(rows) - len(q), len(rows))
        hidden = torch.arange(len(rows)) > last[:, None]
        scores = scores.masked_fill(hidden[:, None], -torch.inf)
    lse = scores.logsumexp(-1)
    return torch.einsum("mhs,sv->mhv", (scores - lse[..., None]).exp(), rows[:, :value_dim]), lse


def paged(pool, page_ids, length):
    """The first rows of a sequence, through its page ids."""
    page_size = pool.shape[1]
    assert ((page_ids >= 0) & (page_ids < len(pool))).all(), "a page id outside the pool"
    return pool[page_ids[: -(-length // page_size)].long()].flatten(0, 1)[:length].squeeze(1)


def fa3_op():
    """The stand-in, registered behind the schema; call it once in a process."""
    library = torch.library.Library("stock_fa3", "FRAGMENT")
    library.define(FA3_SCHEMA)
    names = [argument.name for argument in torch.ops.stock_fa3.fwd.default._schema.arguments]
    library.impl("fwd", lambda *values: fa3_forward(**dict(zip(names, values, strict=True))), "CPU")
    return library, torch.ops.stock_fa3.fwd


def fa3_forward(
    q,
    k,
    v,
    q_v,
    cu_seqlens_q,
    seqused_k,
    max_seqlen_q,
    max_seqlen_k,
    page_table,
    softmax_scale,
    is_causal,
    num_splits,
    **others,
):
    expected = {"window_size_left": -1, "window_size_right": -1, "softcap": 0.0, "sm_margin": 0}
    expected |= {"is_rotary_interleaved": True, "cp_world_size": 1, "cp_rank": 0}
    assert {name: value for name, value in others.items() if value is not None} == expected
    assert num_splits == 0
    assert page_table.is_contiguous()
    assert all(table.dtype == torch.int32 for table in (page_table, seqused_k, cu_seqlens_q))
    assert int(cu_seqlens_q[-1]) == len(q)
    assert int(cu_seqlens_q.diff().max()) == max_seqlen_q
    assert int(seqused_k.max()) <= max_seqlen_k
    assert all(tensor.stride(-1) == 1 for tensor in (q, k, v, q_v))
    whole, pool = torch.cat([q_v, q], -1), torch.cat([v, k], -1)
    bounds = cu_seqlens_q.tolist()
    parts = [
        attend(
            whole[start:stop],
            paged(pool, page_table[n], int(seqused_k[n])),
            v.shape[-1],
            scale=softmax_scale,
            is_causal=is_causal,
        )
        for n, (start, stop) in enumerate(itertools.pairwise(bounds))
    ]
    return [
        torch.cat([out for out, _ in parts]),
        torch.cat([lse for _, lse in parts]).T.contiguous(),
    ]


class FlashMla:
    """The module, of a build with the dense kernel in its legacy half."""

    @staticmethod
    def has_legacy():
        return True

    @staticmethod
    def get_mla_metadata():
        return object(), None

    @staticmethod
    def flash_mla_with_kvcache(
        q,
        k_cache,
        block_table,
        cache_seqlens,
        head_dim_v,
        tile_scheduler_metadata,
        num_splits=None,
        softmax_scale=None,
        causal=False,
        is_fp8_kvcache=None,
        use_legacy=False,
    ):
        assert use_legacy
        assert is_fp8_kvcache is False
        assert num_splits is None
        assert k_cache.shape[1:3] == (64, 1)
        assert block_table.dtype == cache_seqlens.dtype == torch.int32
        assert block_table.is_contiguous()
        pairs = [
            attend(
                q[n],
                paged(k_cache, block_table[n], int(length)),
                head_dim_v,
                scale=softmax_scale,
                is_causal=causal,
            )
            for n, length in enumerate(cache_seqlens)
        ]
        return torch.stack([out for out, _ in pairs]), torch.stack([lse.T for _, lse in pairs])


class FlashInferMla:
    """The module; its wrapper keeps what plan was told and leaves its LSE to base 2."""

    class BatchMLAPagedAttentionWrapper:
        def __init__(self, float_workspace_buffer, backend="auto"):
            assert backend in {"fa2", "fa3"}
            assert float_workspace_buffer.nbytes >= 128 << 20

        def plan(
            self,
            qo_indptr,
            kv_indptr,
            kv_indices,
            kv_len_arr,
            num_heads,
            head_dim_ckv,
            head_dim_kpe,
            page_size,
            causal,
            sm_scale,
            q_data_type,
            kv_data_type,
        ):
            tables = (qo_indptr, kv_indptr, kv_indices, kv_len_arr)
            assert all(table.dtype == torch.int32 for table in tables)
            assert all(not table.is_cuda for table in (qo_indptr, kv_indptr, kv_len_arr))
            assert len(qo_indptr) == len(kv_indptr) == len(kv_len_arr) + 1
            assert len(kv_indices) == kv_indptr[-1]
            assert q_data_type == kv_data_type
            self.tables = tables
            self.shape = (num_heads, head_dim_ckv, head_dim_kpe)
            self.page_size, self.causal, self.scale = page_size, causal, sm_scale

        def run(self, q_nope, q_pe, ckv_cache, kpe_cache, return_lse=False):
            assert (*q_nope.shape[1:], q_pe.shape[-1]) == self.shape
            assert ckv_cache.shape[1] == kpe_cache.shape[1] == self.page_size
            q = torch.cat([q_nope, q_pe], -1)
            pool = torch.cat([ckv_cache, kpe_cache], -1)
            queries, pages, ids, lengths = self.tables
            pairs = [
                attend(
                    q[queries[n] : queries[n + 1]],
                    paged(pool, ids[pages[n] : pages[n + 1]], length),
                    q_nope.shape[-1],
                    scale=self.scale,
                    is_causal=self.causal,
                )
                for n, length in enumerate(lengths.tolist())
            ]
            out = torch.cat([out for out, _ in pairs])
            return (out, torch.cat([lse for _, lse in pairs]) / math.log(2)) if return_lse else out
