"""How the rows of a verify pass are laid out, against published examples."""

import torch

from engine.draft_tree import build_draft_tree
from engine.kernels.tree_attention import CUDA_BACKENDS
from engine.kv_cache import CacheShape, LatentCache
from engine.verify import REFERENCE, Backends, plan_pass


def test_the_nntrainer_tree_starts_at_the_committed_length_and_counts_by_depth():
    """Source: nntrainer/nntrainer test/unittest/unittest_ddtree.cpp, IdsPositionsAndMask.

    Differs: there a start of 5 and a past of 2 are two numbers, here both are the committed rows.
    """
    logits = torch.tensor([[2.0, 1, 0], [0, -1, 1]])
    tree = build_draft_tree(logits, root_token=99, node_budget=3)
    cache = LatentCache(CacheShape(1, 4, 16, 4))
    cache.reserve(0, 5)
    cache.advance(0, 5)

    rows = plan_pass(cache, [0], [tree], REFERENCE)

    assert rows.token_ids.tolist() == [99, 0, 2, 1]
    assert rows.positions.tolist() == [5, 6, 7, 6]
    assert rows.attention.context_lens.tolist() == [5]
    assert rows.attention.slots.tolist() == cache.slots(0, range(5, 9)).tolist()
    assert rows.attention.ancestor_bits.tolist() == [[[0b0001], [0b0011], [0b0111], [0b1001]]]


def test_few_rows_are_multiplied_by_a_kernel_only_beside_cuda_kernels():
    for backend in CUDA_BACKENDS:
        assert Backends(backend, "triton").linear(32) == "cuda"
        assert Backends(backend, "triton").linear(33) == "reference"
    assert Backends("reference", "cuda").linear(32) == "cuda"
    assert Backends("triton_split", "triton").linear(9) == "reference"
