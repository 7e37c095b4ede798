"""One checked call of draft_tree, with room for the trees."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch

from engine.config import check_node_budget
from engine.errors import ShapeError
from engine.kernels.operands import check_device, check_tensor

if TYPE_CHECKING:
    from torch import Tensor

WORD_BITS = 32  # of an ancestor word; int32, since kernels read it so
NO_TREE = 0  # size of a tree whose candidates are no distribution


@dataclass(frozen=True, slots=True, eq=False)
class Trees:
    """Draft trees of N sequences in T rows each; what is behind a tree are children of its root."""

    token_ids: Tensor  # [N, T] int64; the root's in rows behind the tree
    positions: Tensor  # [N, T] int64, the root's and the depth
    parents: Tensor  # [N, T] int32, -1 for the root
    depths: Tensor  # [N, T] int32
    path_log_probs: Tensor  # [N, T] float64, 0 for the root, -inf behind the tree
    ancestor_bits: Tensor  # [N, T, W] int32
    tree_sizes: Tensor  # [N] int32, the root included; NO_TREE = no distribution


_DTYPES = {
    "token_ids": torch.int64,
    "positions": torch.int64,
    "parents": torch.int32,
    "depths": torch.int32,
    "path_log_probs": torch.float64,
    "ancestor_bits": torch.int32,
    "tree_sizes": torch.int32,
}


@dataclass(frozen=True, slots=True)
class Problem:
    """Operands of one call; `trees` is there to be written."""

    log_probs: Tensor  # [N, horizon, K], of K no more than the budget
    token_ids: Tensor  # [N, horizon, K]
    root_tokens: Tensor  # [N]
    root_positions: Tensor  # [N]
    node_budget: int
    trees: Trees

    @property
    def num_rows(self) -> int:
        """Rows of each tree, T."""
        return self.trees.token_ids.shape[1]


def pose(
    log_probs: Tensor,
    token_ids: Tensor,
    root_tokens: Tensor,
    root_positions: Tensor,
    *,
    node_budget: int,
    num_rows: int | None,
    out: Trees | None,
) -> Problem:
    """Check the arguments of `draft_tree`; allocate the trees if none are given."""
    check_node_budget(node_budget, least=0)
    check_tensor("log_probs", log_probs, (None, None, None), (torch.float32,))
    check_tensor("token_ids", token_ids, tuple(log_probs.shape), (torch.int64,))
    N = len(log_probs)
    for name, roots in (("root_tokens", root_tokens), ("root_positions", root_positions)):
        check_tensor(name, roots, (N,), (torch.int64,))
    T = 1 + node_budget if num_rows is None else num_rows
    if node_budget >= T:
        raise ShapeError(
            f"num_rows: expected at least {1 + node_budget}, got {T} (the root and every node)"
        )
    trees = new_trees(N, T, log_probs.device) if out is None else out
    for name, shape in _shapes(N, T).items():
        given: Tensor = getattr(trees, name)
        check_tensor(name, given, shape, (_DTYPES[name],))
        if not given.is_contiguous():
            raise ShapeError(f"{name}: expected contiguous rows, got strides {given.stride()}")
    written = (getattr(trees, field.name) for field in fields(Trees))
    check_device(log_probs.device, (token_ids, root_tokens, root_positions, *written))
    log_probs, token_ids = log_probs[..., :node_budget], token_ids[..., :node_budget]
    return Problem(log_probs, token_ids, root_tokens, root_positions, node_budget, trees)


def new_trees(num_seqs: int, num_rows: int, device: torch.device) -> Trees:
    """Return room for `num_seqs` trees of `num_rows` rows."""
    shapes = _shapes(num_seqs, num_rows)
    return Trees(
        **{
            name: torch.empty(shape, dtype=_DTYPES[name], device=device)
            for name, shape in shapes.items()
        }
    )


def _shapes(num_seqs: int, num_rows: int) -> dict[str, tuple[int, ...]]:
    rows = (num_seqs, num_rows)
    words = (*rows, -(-num_rows // WORD_BITS))
    return dict.fromkeys(_DTYPES, rows) | {"ancestor_bits": words, "tree_sizes": (num_seqs,)}
