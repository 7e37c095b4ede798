"""What the draft tree costs by itself: to build it, to walk it, to compact what it leaves.

`Build` and `Accept` are the host's, candidates and the copy from the device included. `Grow` and
`Walk` are the ops that a step with trees on the device launches, behind the candidates; on CUDA
`cuda` is the replay of a graph between two events, without the launch gap.

Sizes are those of Kimi K2.6 with a block of 8: 7 draft positions, its vocabulary, 61 layers of
latent rows of 576 elements. Logits are random and wide enough for deep trees; no drafter's.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import torch

from benchmarks._device import DEVICE
from benchmarks._regimes import PROFILE, tree_axes, tree_op_budgets
from benchmarks._suite import CaseFacts, Clock, _Suite
from benchmarks._timing import CudaQueue, captured, settled_clock
from engine import DraftTree, accept_batch, build_draft_tree
from engine.kernels import OPS, DraftTreeCase, WalkTreeCase, draft_tree, walk_tree
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
BACKENDS = ["reference", "cuda"] if DEVICE == "cuda" else ["reference"]


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


class _TreeOp(_Suite):
    """An op over one tree, by its backends."""

    params: ClassVar[tuple[list[int], list[str]]] = (tree_op_budgets(PROFILE), BACKENDS)
    param_names: ClassVar[list[str]] = ["node_budget", "tree_backend"]
    window_validity = ("warm_window",) if DEVICE == "cuda" else ()

    def prepare(self, call: Callable[[], Any], backend: str) -> None:
        """Make the body of a case: one launch is captured, what reads back to the host is not."""
        self.is_captured = backend == "cuda"
        self.body = captured(call) if self.is_captured else call

    def make_clock(self) -> Clock:
        """Return the clock that leaves the launch gap out of a replay."""
        if self.is_captured:
            return settled_clock(CudaQueue(), self.body)
        return super().make_clock()


class Grow(_TreeOp):
    """Build one tree from sorted candidates, in the rows of a pass."""

    version = "1"

    def build(self, node_budget: int, tree_backend: str) -> None:
        self.case = DraftTreeCase("grow", "", 1, HORIZON, node_budget, node_budget, spread=4.0)
        inputs = OPS["draft_tree"].inputs(self.case, device=DEVICE)
        self.prepare(partial(draft_tree, **inputs, backend=tree_backend), tree_backend)

    def facts(self) -> CaseFacts:
        """Say that candidates are read and rows are written."""
        return CaseFacts(bytes=OPS["draft_tree"].cost(self.case).bytes)

    def time_grow(self, node_budget: int, tree_backend: str) -> None:
        del node_budget, tree_backend
        self.body()


class Walk(_TreeOp):
    """Walk one tree and name the rows that a commit moves."""

    version = "1"

    def build(self, node_budget: int, tree_backend: str) -> None:
        rows = 1 + node_budget
        width = min(1 + HORIZON, rows)
        self.case = WalkTreeCase("walk", "", 1, rows, width, step=max(1, rows // HORIZON))
        inputs = OPS["walk_tree"].inputs(self.case, device=DEVICE)
        self.prepare(partial(walk_tree, **inputs, backend=tree_backend), tree_backend)

    def facts(self) -> CaseFacts:
        """Say that what the target says and the tree are read, and the path is written."""
        return CaseFacts(bytes=OPS["walk_tree"].cost(self.case).bytes)

    def time_walk(self, node_budget: int, tree_backend: str) -> None:
        del node_budget, tree_backend
        self.body()


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
