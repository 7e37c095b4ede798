"""What the draft tree costs by itself: to build it, to walk it, to compact what it leaves.

Sizes are those of Kimi K2.6 with a block of 8: 7 draft positions, its vocabulary, 61 layers of
latent rows of 576 elements. Logits are random and wide enough for deep trees; no drafter's.
"""

from typing import ClassVar

import torch

from benchmarks._device import DEVICE
from benchmarks._regimes import PROFILE, tree_axes
from benchmarks._suite import CaseFacts, _Suite
from engine import DraftTree, accept_batch, build_draft_tree
from engine.kv_cache import CacheShape, LatentCache

HORIZON = 7
VOCAB_SIZE = 163840
NUM_LAYERS = 61
LATENT_DIM = 576
CONTEXT_TOKENS = 1024
NUM_TREES = 64  # walked in one call, so that the body is long enough to time
WALK_VOCAB_SIZE = 1024  # a walk looks at the tree's tokens only
LOGIT_SPREAD = 8.0
AXES = tree_axes(PROFILE)


class Build(_Suite):
    """Build one tree from the drafter's logits: top-k of every row, then best first."""

    version = "1"
    params: ClassVar[list[int]] = AXES.build_budgets
    param_names: ClassVar[list[str]] = ["node_budget"]

    def build(self, node_budget: int) -> None:
        del node_budget  # the logits do not depend on it
        self.logits = _draft_logits(VOCAB_SIZE, seed=0).to(DEVICE)

    def facts(self) -> CaseFacts:
        """Say that every logit is read once."""
        return CaseFacts(bytes=self.logits.nbytes)

    def time_build(self, node_budget: int) -> None:
        build_draft_tree(self.logits, root_token=0, node_budget=node_budget)


class Accept(_Suite):
    """Walk 64 trees whose target agrees down to the deepest node of each."""

    version = "1"
    params: ClassVar[list[int]] = AXES.accept_budgets
    param_names: ClassVar[list[str]] = ["node_budget"]

    def build(self, node_budget: int) -> None:
        self.trees = [
            build_draft_tree(
                _draft_logits(WALK_VOCAB_SIZE, seed), root_token=0, node_budget=node_budget
            )
            for seed in range(NUM_TREES)
        ]
        self.target_tokens = torch.stack(list(map(_agreeing_target, self.trees))).to(DEVICE)

    def facts(self) -> CaseFacts:
        """Say how long the walks are."""
        lengths = [found.commit_length for found in accept_batch(self.trees, self.target_tokens)]
        return CaseFacts(commit_length=sum(lengths) / len(lengths))

    def time_accept(self, node_budget: int) -> None:
        del node_budget
        accept_batch(self.trees, self.target_tokens)


class Compact(_Suite):
    """Keep the rows of an accepted path that lies scattered over its tree, in every layer."""

    version = "1"
    params: ClassVar[tuple[list[int], list[int]]] = (AXES.compact_budgets, AXES.page_sizes)
    param_names: ClassVar[list[str]] = ["node_budget", "page_size"]

    def build(self, node_budget: int, page_size: int) -> None:
        rows = CONTEXT_TOKENS + 1 + node_budget
        shape = CacheShape(NUM_LAYERS, -(-rows // page_size), page_size, LATENT_DIM)
        self.cache = LatentCache(shape, dtype=torch.bfloat16, device=DEVICE)
        self.cache.reserve(0, CONTEXT_TOKENS)
        self.cache.advance(0, CONTEXT_TOKENS)
        self.tree_size = 1 + node_budget
        self.path = [1 + depth * (node_budget - 1) // (HORIZON - 1) for depth in range(HORIZON)]

    def reset(self) -> None:
        self.cache.truncate(0, CONTEXT_TOKENS)
        self.cache.reserve(0, self.tree_size)

    def facts(self) -> CaseFacts:
        """Say that each accepted row is read and written once in each layer."""
        row_bytes = LATENT_DIM * self.cache.pages.element_size()
        return CaseFacts(
            context_tokens=CONTEXT_TOKENS,
            bytes=2 * NUM_LAYERS * HORIZON * row_bytes,
            commit_length=float(HORIZON + 1),
        )

    def time_commit(self, node_budget: int, page_size: int) -> None:
        del node_budget, page_size
        self.cache.commit(0, self.path)


def _draft_logits(vocab_size: int, seed: int) -> torch.Tensor:
    """Return `[HORIZON, V] float32` on the host."""
    generator = torch.Generator().manual_seed(seed)
    return LOGIT_SPREAD * torch.randn(HORIZON, vocab_size, generator=generator)


def _agreeing_target(tree: DraftTree) -> torch.Tensor:
    """Return `[T] int64` target tokens that follow the tree to its deepest node."""
    parents, tokens = tree.parents.tolist(), tree.token_ids.tolist()
    target = torch.full_like(tree.token_ids, -1)
    node = int(tree.depths.argmax())
    while node:
        target[parents[node]] = tokens[node]
        node = parents[node]
    return target
