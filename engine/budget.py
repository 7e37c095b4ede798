"""How many draft nodes the next step pays for, and which sequence gets them.

A node is worth the tokens it is expected to commit and costs the seconds by which it lengthens
the step. With a cost table measured on the machine, the adaptive policy takes the number of nodes
that promises the most tokens per second. A step runs as fast as the bucket of rows that it is
padded to, so cost is a staircase: it is not convex, and the first drop is not the end. Trees are
built whole and then cut: drafting and building cost a step the same whatever is chosen, but they
count, since a step that costs more anyway has to commit more.
Source: arXiv 2606.01813 (CaDDTree). Differs: bucket ends instead of every number of nodes, all of
them compared, one pool for all sequences. This module measures nothing.
"""

import dataclasses
import json
import math
from bisect import bisect, bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import TypeVar

from engine.config import BUDGET_POLICIES, MAX_NODE_BUDGET, MAX_NUMBER, MAX_SIZE
from engine.draft_tree import DraftTree
from engine.errors import ConfigError
from engine.node_pool import pool_nodes, share_nodes

FORMAT = "cost-table/2"  # of the JSON
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class CostOrigin:
    """What a cost table was measured for; it says nothing about anything else."""

    device_name: str
    torch_version: str
    dtype: str
    attention_backend: str
    moe_backend: str
    graphs: str
    page_size: int
    cache_layout: str
    model: str  # what tells this target and drafter from others

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, expected = getattr(self, field.name), _ORIGIN_TYPES.get(field.name, str)
            if type(value) is not expected:
                raise ConfigError(
                    f"origin.{field.name}: expected {expected.__name__}, got {value!r} (compared "
                    "with the engine's)"
                )


_ORIGIN_TYPES = {"page_size": int}


@dataclass(frozen=True, slots=True)
class CostTable:
    """Measured seconds of a step's stages by rows verified and by committed tokens of a sequence.

    More rows and more context never cost less: measured times are made ascending in rows by least
    squares, then in context by the running maximum, and are kept so. A commit is one of the root
    alone: what each further token of a path costs is not told apart.

    Parameters
    ----------
    num_rows : ascending
        Rows of the verify pass, all trees with their roots, at the end of each bucket.
    context_tokens : ascending
        Committed tokens of each sequence.
    draft_seconds, build_seconds : one value for each context
        Building is that of the largest trees, before they are cut.
    verify_seconds, commit_seconds : one row for each context, one value for each bucket
    origin : CostOrigin

    Raises
    ------
    ConfigError
        A grid is not ascending, lengths do not fit, a time is not finite and positive, or the
        shortest context is too long to tell what less than it costs.
    """

    num_rows: tuple[int, ...]
    context_tokens: tuple[int, ...]
    draft_seconds: tuple[float, ...]
    build_seconds: tuple[float, ...]
    verify_seconds: tuple[tuple[float, ...], ...]
    commit_seconds: tuple[tuple[float, ...], ...]
    origin: CostOrigin

    def __post_init__(self) -> None:
        _check_grid("num_rows", self.num_rows, least=1)
        _check_grid("context_tokens", self.context_tokens, least=0)
        for name in _BY_CONTEXT:
            columns = [self._checked(name)]
            object.__setattr__(self, name, self._by_context(name, columns)[0])
        for name in _BY_ROWS:
            rows = [_ascending(times) for times in self._checked_rows(name)]
            columns = self._by_context(name, list(zip(*rows, strict=True)))
            object.__setattr__(self, name, tuple(zip(*columns, strict=True)))

    def step_times_s(self, context_tokens: float) -> list[float]:
        """Return the seconds of a step for each bucket, all stages, linear in context."""
        left, share = _place(self.context_tokens, context_tokens)
        times = self._at(left)
        if not share:
            return times
        return [
            low + share * (high - low) for low, high in zip(times, self._at(left + 1), strict=True)
        ]

    def _at(self, point: int) -> list[float]:
        """Return the seconds of a step for each bucket at a point of the context grid."""
        same_s = self.draft_seconds[point] + self.build_seconds[point]
        by_rows = zip(self.verify_seconds[point], self.commit_seconds[point], strict=True)
        return [same_s + verify_s + commit_s for verify_s, commit_s in by_rows]

    def _checked(self, name: str) -> tuple[float, ...]:
        times: tuple[float, ...] = getattr(self, name)
        _check_length(name, times, len(self.context_tokens))
        _check_times(name, times)
        return times

    def _checked_rows(self, name: str) -> tuple[tuple[float, ...], ...]:
        rows: tuple[tuple[float, ...], ...] = getattr(self, name)
        _check_length(name, rows, len(self.context_tokens))
        for times in rows:
            _check_length(f"{name} of a context", times, len(self.num_rows))
            _check_times(name, times)
        return rows

    def _by_context(self, name: str, columns: Sequence[Sequence[float]]) -> list[tuple[float, ...]]:
        """Make each column ascending by context; refuse a negative draft or verify time."""
        ascending = [tuple(accumulate(times, max)) for times in columns]
        left, share = _place(self.context_tokens, 0)
        for times in ascending if name in _LONG else ():
            if share and times[left] + share * (times[left + 1] - times[left]) <= 0.0:
                raise ConfigError(
                    f"context_tokens: expected a shorter one than {self.context_tokens[0]}, got "
                    f"{times[0]} s there and {times[1]} s at the next (less than no time at 0)"
                )
        return ascending

    def check_origin(self, origin: CostOrigin) -> None:
        """Refuse another origin than the table's with a `ConfigError` that names what differs."""
        for field in dataclasses.fields(origin):
            measured, asked = getattr(self.origin, field.name), getattr(origin, field.name)
            if measured != asked:
                raise ConfigError(
                    f"cost table: expected one measured for {field.name} {asked!r}, got one for "
                    f"{measured!r} (its seconds hold for nothing else)"
                )

    def to_json(self) -> str:
        """Return the table as JSON, to be read with `from_json`."""
        return json.dumps({"format": FORMAT, **dataclasses.asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str) -> "CostTable":
        """Read a table from what `to_json` wrote.

        Raises
        ------
        ConfigError
            It is no JSON, of another format, or no table that could have been measured.
        """
        try:
            record = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"cost table: expected JSON, got {error} (damaged?)") from error
        stored = record.get("format") if isinstance(record, dict) else None
        if stored is not None and stored != FORMAT:
            raise ConfigError(
                f"cost table: expected the format {FORMAT!r}, got {stored!r} (measure it anew: "
                "what a step costs is told in other parts)"
            )
        names = {field.name for field in dataclasses.fields(cls)}
        _check_names("cost table", record, {"format", *names})
        origin = record["origin"]
        _check_names("origin", origin, {field.name for field in dataclasses.fields(CostOrigin)})
        by_rows = {
            name: tuple(_list(f"{name} of a context", row) for row in _list(name, record[name]))
            for name in _BY_ROWS
        }
        return cls(
            num_rows=_list("num_rows", record["num_rows"]),
            context_tokens=_list("context_tokens", record["context_tokens"]),
            draft_seconds=_list("draft_seconds", record["draft_seconds"]),
            build_seconds=_list("build_seconds", record["build_seconds"]),
            verify_seconds=by_rows["verify_seconds"],
            commit_seconds=by_rows["commit_seconds"],
            origin=CostOrigin(**origin),
        )


_LONG = ("draft_seconds", "verify_seconds")  # the others are noise beside them
_BY_CONTEXT = ("draft_seconds", "build_seconds")
_BY_ROWS = ("verify_seconds", "commit_seconds")


def tree_budget(policy: str, node_budget: int, num_seqs: int) -> int:
    """Return how many nodes each tree needs for `allot` to choose from, root excluded.

    Where sequences share, one of them may get what all would have got together.
    """
    if policy == "fixed":
        return node_budget
    return min(MAX_NODE_BUDGET, node_budget * num_seqs)


def allot(
    trees: Sequence[DraftTree],
    policy: str,
    node_budget: int,
    table: CostTable | None,
    context_tokens: float,
) -> list[DraftTree]:
    """Cut the trees of a batch to the nodes that the policy pays for, in the order of `trees`.

    Parameters
    ----------
    trees : sequence of DraftTree
        Of at least `tree_budget(...)` nodes each, or of all there are.
    policy : "fixed", "shared" or "adaptive"
        As in `EngineConfig`.
    node_budget : int
        Draft nodes for each sequence; for all of them together, as many times that.
    table : CostTable, optional
        What "adaptive" weighs; the other policies do not look at it.
    context_tokens : float
        Mean of the sequences' committed tokens.

    Raises
    ------
    ConfigError
        The policy is unknown, or it is "adaptive" and the table is missing or too small.
    """
    if policy == "fixed":
        return [tree.prefix(min(node_budget, tree.num_nodes)) for tree in trees]
    if policy == "shared":
        return share_nodes(trees, node_budget * len(trees))
    if policy != "adaptive":
        raise ConfigError(
            f"budget_policy: expected one of {', '.join(BUDGET_POLICIES)}, got {policy!r} "
            "(no silent fall-back)"
        )
    if table is None:
        raise ConfigError("cost table: expected one, got none (what an adaptive budget weighs)")
    pool = pool_nodes(trees, node_budget * len(trees))
    gains = [math.exp(weight) for weight in pool.path_log_probs]
    return pool.take(choose_num_nodes(gains, len(trees), table, context_tokens))


def choose_num_nodes(
    gains: Sequence[float], num_seqs: int, table: CostTable, context_tokens: float
) -> int:
    """Return the number of nodes, all trees together, that promises the most tokens per second.

    With n nodes a step commits `num_seqs + sum(gains[:n])` tokens in the time of its draft and
    build and of a verify pass and a commit of `num_seqs + n` rows. Compared are the ends of all
    buckets and of the list; within a bucket more nodes cost nothing. Equal rates go to fewer nodes.

    Parameters
    ----------
    gains : descending
        Path probabilities of the pooled nodes: the tokens each is expected to commit.
    num_seqs : int
        Trees, each of which has a root to verify.
    table, context_tokens
        As in `allot`.

    Raises
    ------
    ConfigError
        The table has no bucket for the roots alone.
    """
    num_rows = table.num_rows
    first = bisect_left(num_rows, num_seqs)
    if first == len(num_rows):
        raise ConfigError(
            f"num_rows: expected at most {num_rows[-1]}, got {num_seqs} (the largest bucket of "
            "the cost table)"
        )
    most = min(len(gains), num_rows[-1] - num_seqs)
    tokens = list(accumulate(gains[:most], initial=float(num_seqs)))
    best, best_rate = 0, 0.0
    for rows, time_s in zip(
        num_rows[first:], table.step_times_s(context_tokens)[first:], strict=True
    ):
        num_nodes = min(rows - num_seqs, most)
        if (rate := tokens[num_nodes] / time_s) > best_rate:  # so the first of equals
            best, best_rate = num_nodes, rate
        if num_nodes == most:
            break
    return best


def _ascending(times: Sequence[float]) -> tuple[float, ...]:
    """Return the ascending values nearest to `times` in least squares: what descends is pooled."""
    levels: list[tuple[float, int]] = []  # mean and number of the values pooled
    for time in times:
        mean, size = time, 1
        while levels and levels[-1][0] > mean:
            before, count = levels.pop()
            mean, size = (before * count + mean * size) / (count + size), count + size
        levels.append((mean, size))
    return tuple(mean for mean, size in levels for _ in range(size))


def _place(grid: Sequence[int], at: float) -> tuple[int, float]:
    """Return the grid point left of `at`, and how far to the next it lies: also beyond the grid."""
    if len(grid) == 1:
        return 0, 0.0  # one point holds for all
    right = min(max(bisect(grid, at), 1), len(grid) - 1)
    return right - 1, (at - grid[right - 1]) / (grid[right] - grid[right - 1])


def _check_grid(name: str, grid: Sequence[int], *, least: int) -> None:
    is_ascending = all(type(value) is int for value in grid) and all(
        low < high for low, high in pairwise(grid)
    )
    if not grid or not is_ascending or grid[0] < least or grid[-1] > MAX_SIZE:
        raise ConfigError(
            f"{name}: expected ascending integers from {least} on, at most {MAX_SIZE}, got "
            f"{list(grid)} (grid of a cost table)"
        )


def _check_length(name: str, values: Sequence[object], length: int) -> None:
    if len(values) != length:
        raise ConfigError(
            f"{name}: expected {length}, got {len(values)} (one for each point of the grid)"
        )


def _check_times(name: str, times: Sequence[float]) -> None:
    for time in times:
        if type(time) not in (float, int) or not 0.0 < time <= MAX_NUMBER:
            raise ConfigError(f"{name}: expected finite seconds > 0, got {time!r} (measured times)")


def _check_names(what: str, record: object, names: set[str]) -> None:
    if not isinstance(record, dict) or set(record) != names:
        got = sorted(record) if isinstance(record, dict) else type(record).__name__
        raise ConfigError(f"{what}: expected {sorted(names)}, got {got} (written by to_json)")


def _list(name: str, values: list[_T]) -> tuple[_T, ...]:
    if not isinstance(values, list):
        raise ConfigError(f"{name}: expected a list, got {values!r} (written by to_json)")
    return tuple(values)
