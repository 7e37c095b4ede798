"""The draft tree: built best first under a node budget, walked by what the target says.

The drafter gives one distribution for each depth. A prefix weighs the product of its tokens'
probabilities, and the best tree of n nodes is the n heaviest prefixes: the most accepted tokens a
tree of that size can be expected to give. A heap finds them in order of weight, so node ids are
the order of choice and a smaller budget gives a prefix of the same list.

::

    depth 0        7              node 0, the root: last committed token
                 /   \
    depth 1    11     12          nodes 1 and 3, chosen first and third
                |
    depth 2    21                 node 2

This module knows nothing about caches, models or devices' kernels; trees live on the host unless
moved with `DraftTree.to`.
"""

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.candidates import top_candidates
from engine.config import check_node_budget
from engine.errors import BudgetError, ShapeError
from engine.kernels.draft_tree.problem import WORD_BITS
from engine.kernels.draft_tree.reference import Node, ancestor_words, best_nodes
from engine.kernels.tree_walk.reference import follow


@dataclass(frozen=True, slots=True, eq=False)
class DraftTree:
    """Candidate continuations of one sequence; node 0 is the root, T = 1 + num_nodes.

    Parameters
    ----------
    token_ids : [T] int64
    parents : [T] int32
        The root has parent -1; every other parent comes before its child.
    depths : [T] int32
        Distance from the root.
    path_log_probs : [T] float64
        Sum of drafter log-probs from the root to the node; 0 for the root, never ascending.
    """

    token_ids: Tensor
    parents: Tensor
    depths: Tensor
    path_log_probs: Tensor

    def __post_init__(self) -> None:
        for name, dtype in _FIELD_DTYPES.items():
            values: Tensor = getattr(self, name)
            if values.ndim != 1 or values.dtype != dtype or values.shape != self.token_ids.shape:
                raise ShapeError(
                    f"{name}: expected [{self.token_ids.numel()}] {dtype}, got "
                    f"{list(values.shape)} {values.dtype} (one value for each node and the root)"
                )
        if not self.token_ids.numel():
            raise ShapeError("token_ids: expected at least the root, got [0] (node 0)")

    @property
    def tree_size(self) -> int:
        """Tokens to verify: the root and all nodes."""
        return self.token_ids.shape[0]

    @property
    def num_nodes(self) -> int:
        """Draft nodes, root excluded."""
        return self.tree_size - 1

    @property
    def expected_commit_length(self) -> float:
        """One plus the sum of all path probabilities: the mean the drafter itself believes in."""
        return 1.0 + sum(math.exp(value) for value in self.path_log_probs[1:].tolist())

    def ancestor_bits(self) -> Tensor:
        """Return the ancestor mask in words.

        Returns
        -------
        Tensor
            `[T, W] int32` with `W = ceil(T / 32)`; bit `j % 32` of word `j // 32` of row i is set
            iff node j is node i or an ancestor of it.

        Raises
        ------
        ShapeError
            A parent does not come before its child.
        """
        return ancestor_words(self.parents.tolist()).to(self.parents.device)

    def ancestor_mask(self) -> Tensor:
        """Return `[T, T] bool`: node i may attend node j iff j is i or an ancestor of i."""
        words = self.ancestor_bits()
        shifts = torch.arange(WORD_BITS, dtype=torch.int32, device=words.device)
        bits = words[:, :, None] >> shifts & 1  # [T, W, 32]
        return bits.flatten(1)[:, : self.tree_size].bool()

    def prefix(self, num_nodes: int) -> "DraftTree":
        """Return what a smaller budget would have built, the first nodes, as views; or this tree.

        Raises
        ------
        BudgetError
            `num_nodes` is not in `0..self.num_nodes`.
        """
        if not 0 <= num_nodes <= self.num_nodes:
            raise BudgetError(
                f"num_nodes: expected 0..{self.num_nodes}, got {num_nodes} (nodes of this tree)"
            )
        if num_nodes == self.num_nodes:
            return self
        return DraftTree(*(getattr(self, name)[: 1 + num_nodes] for name in _FIELD_DTYPES))

    def to(self, device: torch.device | str) -> "DraftTree":
        """Return the same tree with its tensors on `device`."""
        return DraftTree(*(getattr(self, name).to(device) for name in _FIELD_DTYPES))


_FIELD_DTYPES = {
    "token_ids": torch.int64,
    "parents": torch.int32,
    "depths": torch.int32,
    "path_log_probs": torch.float64,
}


@dataclass(frozen=True, slots=True, eq=False)
class Acceptance:
    """The part of a draft tree the target agreed with."""

    path: Tensor  # [num_accepted] int32 node ids from the root down, root excluded
    bonus_token: int  # emitted by the target after `path`; the next root

    @property
    def num_accepted(self) -> int:
        """Accepted draft tokens, without root and bonus."""
        return self.path.shape[0]

    @property
    def commit_length(self) -> int:
        """Tokens the step appends: the accepted ones and the bonus."""
        return self.num_accepted + 1


def build_draft_tree(draft_logits: Tensor, *, root_token: int, node_budget: int) -> DraftTree:
    """Build the tree of the `node_budget` heaviest prefixes from the drafter's logits.

    Parameters
    ----------
    draft_logits : [horizon, V] float32
        Row d is the drafter's distribution at depth d + 1. -inf bans a token. Not mutated.
    root_token : int
        The last committed token.
    node_budget : int
        Most draft nodes, root excluded: 0 gives the root only, at most `MAX_NODE_BUDGET`.

    Raises
    ------
    BudgetError
        The budget is negative or beyond the limit.
    ShapeError
        The logits have another shape or dtype, or hold NaN or +inf.

    Notes
    -----
    Within a depth the order is descending logit, equal logits by ascending token id. No
    temperature is applied. Source: arXiv 2604.12989; liranringel/ddtree ddtree.py (c96427a).
    Differs: the order of equal logits, which is not defined there.
    """
    _check_matrix("draft_logits", draft_logits, torch.float32, "[horizon, V]")
    return build_draft_trees(draft_logits[None], [root_token], node_budget)[0]


def build_draft_trees(
    draft_logits: Tensor, root_tokens: Sequence[int], node_budget: int
) -> list[DraftTree]:
    """Build the trees of N sequences from logits [N, horizon, V], as `build_draft_tree` each.

    Logits on a device are read back to the host once for all of them.
    """
    return _build_all(draft_logits, root_tokens, node_budget, width=node_budget)


def chain_trees(
    draft_logits: Tensor, root_tokens: Sequence[int], node_budget: int
) -> list[DraftTree]:
    """Build the linear drafts of N sequences from logits [N, horizon, V], as `chain_tree` each."""
    return _build_all(draft_logits, root_tokens, node_budget, width=1)


def chain_tree(draft_logits: Tensor, *, root_token: int, node_budget: int) -> DraftTree:
    """Build the linear draft, one chain of the likeliest token of each depth.

    All else is as in `build_draft_tree`. It ends before a depth in which every token is banned.
    """
    _check_matrix("draft_logits", draft_logits, torch.float32, "[horizon, V]")
    return chain_trees(draft_logits[None], [root_token], node_budget)[0]


def root_tree(root_token: int) -> DraftTree:
    """Build the tree of the root alone: the step of autoregressive decoding."""
    return _flatten([root_token], [-1], [], [])


def build_from_log_probs(
    log_probs: Tensor, token_ids: Tensor, *, root_token: int, node_budget: int
) -> DraftTree:
    """Build the tree of the `node_budget` heaviest prefixes from log-probs sorted by depth.

    Parameters
    ----------
    log_probs : [horizon, K] float32
        Row d holds the candidates of depth d + 1, descending. -inf is never chosen. The result
        is the reference's whatever the values; its nodes are the heaviest prefixes if none is
        positive and K is at least min(node_budget, V).
    token_ids : [horizon, K] int64
        The candidates' tokens, distinct within a row.
    root_token, node_budget
        As in `build_draft_tree`.

    Raises
    ------
    BudgetError
        The budget is negative or beyond the limit.
    ShapeError
        Shapes or dtypes differ from the above; a log-prob is NaN or +inf; a row is not
        descending; two siblings carry one token.
    """
    check_node_budget(node_budget, least=0)
    _check_matrix("log_probs", log_probs, torch.float32, "[horizon, K]")
    _check_matrix("token_ids", token_ids, torch.int64, "[horizon, K]")
    if token_ids.shape != log_probs.shape:
        raise ShapeError(
            f"token_ids: expected {list(log_probs.shape)}, got {list(token_ids.shape)} "
            "(one token for each log-prob)"
        )
    if not bool((log_probs < torch.inf).all()):  # false for NaN as well
        raise ShapeError("log_probs: expected no NaN and no +inf, got some (no distribution)")
    if not bool((log_probs[:, :-1] >= log_probs[:, 1:]).all()):
        raise ShapeError(
            "log_probs: expected descending rows, got an ascending pair (siblings are tried in "
            "rank order)"
        )
    return _build(log_probs, token_ids, root_token, node_budget)


def accept(tree: DraftTree, target_tokens: Tensor) -> Acceptance:
    """Walk from the root along the target's own tokens for as long as they are in the tree.

    Parameters
    ----------
    tree : DraftTree
    target_tokens : [T] int64 or int32
        What the target says after each node. A CUDA tensor is read back to the host.

    Raises
    ------
    ShapeError
        `target_tokens` has another shape or dtype.
    """
    _check_tokens(target_tokens, (tree.tree_size,))
    return _walk(tree, target_tokens.tolist())


def accept_batch(trees: Sequence[DraftTree], target_tokens: Tensor) -> list[Acceptance]:
    """Walk each tree along its row of target tokens; one read back to the host for all.

    Parameters
    ----------
    trees : sequence of N DraftTree
    target_tokens : [N, T] int64 or int32
        T is the size of the largest tree or more; what lies beyond a tree is not looked at.

    Raises
    ------
    ShapeError
        `target_tokens` has another shape or dtype.
    """
    largest = max((tree.tree_size for tree in trees), default=0)
    width = target_tokens.shape[1] if target_tokens.ndim == 2 else 0
    _check_tokens(target_tokens, (len(trees), max(largest, width)))
    rows = target_tokens.tolist()
    return [_walk(tree, row) for tree, row in zip(trees, rows, strict=True)]


def _build_all(
    draft_logits: Tensor, root_tokens: Sequence[int], node_budget: int, *, width: int
) -> list[DraftTree]:
    check_node_budget(node_budget, least=0)
    found = top_candidates(draft_logits, max(1, width))
    rows = zip(found.log_probs, found.token_ids, root_tokens, strict=True)
    return [_build(*one, node_budget) for one in rows]


def _build(log_probs: Tensor, token_ids: Tensor, root_token: int, node_budget: int) -> DraftTree:
    return tree_of(best_nodes(log_probs, node_budget), token_ids, root_token)


def tree_of(nodes: Sequence[Node], token_ids: Tensor, root_token: int) -> DraftTree:
    """Return the tree of `nodes`, in the order of their search; their tokens are [horizon, K]."""
    ids = token_ids.tolist()
    tokens = [root_token, *(ids[len(ranks) - 1][ranks[-1]] for _, ranks, _ in nodes)]
    parents = [-1, *(parent for _, _, parent in nodes)]
    if len(set(zip(parents, tokens, strict=True))) != len(tokens):
        raise ShapeError(
            "token_ids: expected distinct tokens within a row, got one twice (a walk could not "
            "tell siblings apart)"
        )
    depths = [len(ranks) for _, ranks, _ in nodes]
    return _flatten(tokens, parents, depths, [-cost for cost, _, _ in nodes])


def _flatten(
    token_ids: Sequence[int],
    parents: Sequence[int],
    depths: Sequence[int],
    path_log_probs: Sequence[float],
) -> DraftTree:
    """Make the tensors of a tree from lists; depths and weights leave the root out."""
    return DraftTree(
        token_ids=torch.frombuffer(array("q", token_ids), dtype=torch.int64),
        parents=torch.frombuffer(array("i", parents), dtype=torch.int32),
        depths=torch.frombuffer(array("i", [0, *depths]), dtype=torch.int32),
        path_log_probs=torch.frombuffer(array("d", [0.0, *path_log_probs]), dtype=torch.float64),
    )


def _walk(tree: DraftTree, target_tokens: Sequence[int]) -> Acceptance:
    parents, tokens = tree.parents.tolist(), tree.token_ids.tolist()
    path, bonus_token = follow(target_tokens, tokens, parents, most=tree.num_nodes)
    return Acceptance(torch.tensor(path, dtype=torch.int32), bonus_token)


def _check_matrix(name: str, values: Tensor, dtype: torch.dtype, letters: str) -> None:
    if values.ndim != 2 or values.dtype != dtype:
        raise ShapeError(
            f"{name}: expected {letters} {dtype}, got {list(values.shape)} {values.dtype} "
            "(nothing is cast, rounding decides ties)"
        )


def _check_tokens(tokens: Tensor, shape: tuple[int, ...]) -> None:
    if tokens.shape != shape or tokens.dtype not in (torch.int64, torch.int32):
        raise ShapeError(
            f"target_tokens: expected {list(shape)} integers, got {list(tokens.shape)} "
            f"{tokens.dtype} (what the target says after each node)"
        )
