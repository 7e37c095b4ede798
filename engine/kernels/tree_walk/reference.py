"""The definition of walk_tree in plain Python."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from engine.kernels.tree_walk.problem import NO_TOKEN, NO_WALK

if TYPE_CHECKING:
    from collections.abc import Sequence

    from engine.kernels.tree_walk.problem import Problem


def run(problem: Problem) -> None:
    """Write the walks, one after the other; operands on a device are read back."""
    walk, T, width = problem.walk, problem.num_rows, problem.width
    host = (problem.target_tokens, problem.token_ids, problem.parents, problem.tree_sizes)
    said, tokens, parents, sizes = (one.cpu().tolist() for one in host)
    for n, size in enumerate(sizes):
        is_sound = 1 <= size <= T and min(said[n][:size]) >= 0
        path, spoken = [0], [NO_TOKEN]
        if is_sound:
            accepted, bonus = follow(said[n], tokens[n][:size], parents[n][:size], most=width - 1)
            path += accepted
            spoken = [*(tokens[n][node] for node in accepted), bonus]
        walk.num_accepted[n] = len(path) - 1 if is_sound else NO_WALK
        walk.path[n] = torch.tensor([*path, *range(len(path), width)])
        walk.tokens[n] = torch.tensor([*spoken, *[NO_TOKEN] * (width - len(spoken))])
    walk.sources.copy_(problem.slots.gather(1, walk.path))


def follow(
    target_tokens: Sequence[int], token_ids: Sequence[int], parents: Sequence[int], *, most: int
) -> tuple[list[int], int]:
    """Return the accepted nodes of a tree, at most so many, and the token said after the last."""
    children = {(parents[node], token_ids[node]): node for node in range(1, len(parents))}
    path: list[int] = []
    node, bonus = 0, target_tokens[0]
    while len(path) < most and (node, bonus) in children:
        node = children[node, bonus]
        path.append(node)
        bonus = target_tokens[node]
    return path, bonus
