"""One checked call of walk_tree, with room for what it finds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from engine.config import MAX_NODE_BUDGET
from engine.errors import ShapeError
from engine.kernels.operands import check_device, check_tensor

if TYPE_CHECKING:
    from torch import Tensor

NO_TOKEN = -1  # behind the bonus token
NO_WALK = -1  # accepted nodes of a tree that the target says nothing about
MOST_ROWS = 2 * (1 + MAX_NODE_BUDGET)  # of a tree and what fills it up


@dataclass(frozen=True, slots=True, eq=False)
class Walk:
    """What of N trees the target agrees with, and where the rows of a path are."""

    num_accepted: Tensor  # [N] int32, without the root; NO_WALK = a row said nothing
    path: Tensor  # [N, width] int64 nodes, the root first, then themselves
    tokens: Tensor  # [N, width] int64: of the accepted nodes, the bonus, then NO_TOKEN
    sources: Tensor  # [N, width] int64: slots of the path's rows, to be moved to the first ones


@dataclass(frozen=True, slots=True)
class Problem:
    """Operands of one call; `walk` is there to be written."""

    target_tokens: Tensor  # [N, T]
    token_ids: Tensor  # [N, T]
    parents: Tensor  # [N, T]
    tree_sizes: Tensor  # [N]
    slots: Tensor  # [N, T]
    width: int
    walk: Walk

    @property
    def num_rows(self) -> int:
        """Rows of each tree, T."""
        return self.token_ids.shape[1]


def pose(
    target_tokens: Tensor,
    token_ids: Tensor,
    parents: Tensor,
    tree_sizes: Tensor,
    slots: Tensor,
    *,
    width: int,
) -> Problem:
    """Check the arguments of `walk_tree` and allocate what it gives."""
    check_tensor("target_tokens", target_tokens, (None, None), (torch.int64,))
    N, T = target_tokens.shape
    check_tensor("token_ids", token_ids, (N, T), (torch.int64,))
    check_tensor("parents", parents, (N, T), (torch.int32,))
    check_tensor("tree_sizes", tree_sizes, (N,), (torch.int32,))
    check_tensor("slots", slots, (N, T), (torch.int64,))
    whole = {"token_ids": token_ids, "parents": parents, "tree_sizes": tree_sizes, "slots": slots}
    for name, one in whole.items():
        if not one.is_contiguous():
            raise ShapeError(f"{name}: expected contiguous rows, got strides {one.stride()}")
    if T > MOST_ROWS:
        raise ShapeError(f"target_tokens: expected at most {MOST_ROWS} rows of a tree, got {T}")
    if not 1 <= width <= T:
        raise ShapeError(f"width: expected 1..{T}, got {width} (nodes of a path)")
    check_device(target_tokens.device, whole.values())
    walk = Walk(
        torch.empty_like(tree_sizes),
        *(slots.new_empty(N, width) for _ in ("path", "tokens", "sources")),
    )
    return Problem(target_tokens, token_ids, parents, tree_sizes, slots, width, walk)
