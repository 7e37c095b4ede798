"""How many draft nodes the next step pays for, and which sequence gets them.

A node is worth the tokens it is expected to commit and costs the seconds by which it lengthens
the step. With a cost table measured on the machine, the adaptive policy takes the number of nodes
that promises the most tokens per second:

::

    cost     of a whole step, by the bucket of rows that it is padded to. Measured times are taken
             as they are: a staircase is not convex, and a bucket whose larger neighbour costs less
             is never the best. So the first drop is not the end: all buckets are compared.
    worth    the drafter's probability of a node, times how often nodes at its place in the order
             of choice were accepted for what they had promised (`Odds`). No target's logit is
             looked at before the tree is fixed, so what is sampled stays the target's own.
    growth   nodes are found one after the other, and no more of them once those behind, each as
             likely as the last one at most, could not pay in any bucket.

Source: arXiv 2606.01813 (CaDDTree). Differs: bucket ends instead of every number of nodes, all of
them compared, one pool for all sequences, promises held against outcomes. This module measures
nothing: it has no clock, so equal steps choose equal trees.
"""

import dataclasses
import json
import math
import sys
from bisect import bisect, bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate, islice, pairwise
from typing import TypeVar

from torch import Tensor

from engine.config import MAX_NODE_BUDGET, MAX_NUMBER, MAX_SIZE, EngineConfig
from engine.draft_tree import Acceptance, DraftTree, build_draft_trees, chain_trees
from engine.errors import ConfigError
from engine.node_pool import Odds, merged, share_nodes, tree_searches

FORMAT = "cost-table/3"  # of the JSON
MIN_SECONDS = sys.float_info.min
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
    """Measured seconds of a whole step by rows verified and by committed tokens of a sequence.

    More context never costs less: measured times become the running maximum in it. Rows keep
    what was measured, less of it for more rows too.

    Parameters
    ----------
    num_rows : ascending
        Rows of the verify pass, all trees with their roots, at the end of each bucket.
    context_tokens : ascending
        Committed tokens of each sequence.
    step_seconds : one row for each context, one value for each bucket
        Of one sequence.
    sequence_seconds : one value for each context
        What every further sequence adds, whatever its rows.
    origin : CostOrigin

    Raises
    ------
    ConfigError
        A grid is not ascending, lengths do not fit, a time is not finite, or none but that of a
        further sequence, or the shortest context is too long to tell what less than it costs.
    """

    num_rows: tuple[int, ...]
    context_tokens: tuple[int, ...]
    step_seconds: tuple[tuple[float, ...], ...]
    sequence_seconds: tuple[float, ...]
    origin: CostOrigin

    def __post_init__(self) -> None:
        _check_grid("num_rows", self.num_rows, least=1)
        _check_grid("context_tokens", self.context_tokens, least=0)
        for name in ("step_seconds", "sequence_seconds"):
            _check_length(name, getattr(self, name), len(self.context_tokens))
        for times in self.step_seconds:
            _check_length("step_seconds of a context", times, len(self.num_rows))
            _check_times("step_seconds", times)
        _check_times("sequence_seconds", self.sequence_seconds, least=0.0)
        by_rows = [tuple(accumulate(times, max)) for times in zip(*self.step_seconds, strict=True)]
        left, share = _place(self.context_tokens, 0)
        for times in by_rows:
            if share and times[left] + share * (times[left + 1] - times[left]) <= 0.0:
                raise ConfigError(
                    f"context_tokens: expected a shorter one than {self.context_tokens[0]}, got "
                    f"{times[0]} s there and {times[1]} s at the next (less than no time at 0)"
                )
        object.__setattr__(self, "step_seconds", tuple(zip(*by_rows, strict=True)))
        object.__setattr__(self, "sequence_seconds", tuple(accumulate(self.sequence_seconds, max)))

    def step_times_s(self, num_seqs: int, context_tokens: float) -> list[float]:
        """Return the seconds of a step for each bucket, linear in context."""
        left, share = _place(self.context_tokens, context_tokens)
        times = self._at(left, num_seqs)
        if not share:
            return times
        return [
            low + share * (high - low)
            for low, high in zip(times, self._at(left + 1, num_seqs), strict=True)
        ]

    def _at(self, point: int, num_seqs: int) -> list[float]:
        """Return the seconds of a step for each bucket at a point of the context grid."""
        others_s = (num_seqs - 1) * self.sequence_seconds[point]
        return [time_s + others_s for time_s in self.step_seconds[point]]

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
        return cls(
            num_rows=_list("num_rows", record["num_rows"]),
            context_tokens=_list("context_tokens", record["context_tokens"]),
            step_seconds=tuple(
                _list("step_seconds of a context", row)
                for row in _list("step_seconds", record["step_seconds"])
            ),
            sequence_seconds=_list("sequence_seconds", record["sequence_seconds"]),
            origin=CostOrigin(**origin),
        )


def tree_budget(policy: str, node_budget: int, num_seqs: int) -> int:
    """Return how many nodes each tree may have, root excluded.

    Where sequences share, one of them may get what all would have got together.
    """
    if policy == "fixed":
        return node_budget
    return min(MAX_NODE_BUDGET, node_budget * num_seqs)


@dataclass(frozen=True, slots=True)
class Budget:
    """Builds the trees of a batch under an engine's policy, and learns from what became of them.

    Parameters
    ----------
    config : EngineConfig
    table : CostTable, optional
        What "adaptive" weighs; the other policies do not look at it.
    """

    config: EngineConfig
    table: CostTable | None
    odds: Odds = dataclasses.field(default_factory=Odds)

    def build(
        self, draft_logits: Tensor, roots: Sequence[int], most: int, context_tokens: float
    ) -> list[DraftTree]:
        """Return one tree for each row of logits [N, horizon, V].

        Parameters
        ----------
        most : int
            As `tree_budget` says, or the drafter's horizon where trees are chains.
        context_tokens : float
            Mean of the sequences' committed tokens.

        Raises
        ------
        ConfigError
            The policy is "adaptive" and the table has no bucket for the roots alone.
        """
        config, is_chain = self.config, self.config.mode == "dflash"
        node_budget = config.node_budget
        if config.budget_policy == "adaptive" and self.table is not None:
            searches = tree_searches(draft_logits, roots, most, is_chain=is_chain)
            in_all = node_budget * len(roots)
            counts = choose_nodes(searches, in_all, self.table, self.odds, context_tokens)
            return [search.tree(n) for search, n in zip(searches, counts, strict=True)]
        build_trees = chain_trees if is_chain else build_draft_trees
        trees = build_trees(draft_logits, roots, most)
        if config.budget_policy == "shared":
            return share_nodes(trees, node_budget * len(trees))
        return trees

    def tell(self, trees: Sequence[DraftTree], outcomes: Sequence[Acceptance]) -> None:
        """Learn what the target accepted of trees, where that is of any use."""
        if self.config.budget_policy == "adaptive":
            self.odds.tell(trees, outcomes)


def choose_nodes(
    costs: Sequence[Iterable[float]],
    most: int,
    table: CostTable,
    odds: Odds,
    context_tokens: float,
) -> list[int]:
    """Return how many nodes of each sequence promise together the most tokens per second.

    With n nodes a step of N sequences commits N tokens and what the n are worth, in the time of its
    bucket. Compared are the ends of all buckets and of the nodes; within a bucket more nodes cost
    nothing. Equal rates go to fewer nodes.

    Parameters
    ----------
    costs : sequence of N iterables
        Minus the path log-probs of each tree's nodes, as a `TreeSearch` finds them: no more are
        taken than may pay.
    most : int
        Nodes of all trees.
    table, odds
        What is weighed.
    context_tokens : float
        Mean of the sequences' committed tokens.

    Raises
    ------
    ConfigError
        The table has no bucket for the roots alone.
    """
    num_seqs = len(costs)
    ends = _ends(table, num_seqs, most, context_tokens)
    pool, ratios, counts = merged(costs), odds.ratios(), [0] * num_seqs
    best, best_rate, tokens, last, num_nodes = counts.copy(), 0.0, float(num_seqs), 1.0, 0
    for index, (end, time_s) in enumerate(ends):
        largest = last * max(ratios[min(counts).bit_length() :])  # that a node behind is worth
        for nodes, seconds in ends[index:]:
            if tokens + (nodes - num_nodes) * largest > best_rate * seconds:
                break  # this may pay
        else:
            break  # nothing can
        for cost, owner in islice(pool, end - num_nodes):
            last, count = math.exp(-cost), counts[owner]
            tokens += last * ratios[count.bit_length()]
            counts[owner] = count + 1
        num_nodes = sum(counts)
        if (rate := tokens / time_s) > best_rate:  # so the first of equals
            best, best_rate = counts.copy(), rate
        if num_nodes < end:
            break
    return best


def _ends(
    table: CostTable, num_seqs: int, most: int, context_tokens: float
) -> list[tuple[int, float]]:
    """Return the nodes that each bucket has room for, up to `most`, and the seconds of a step."""
    num_rows = table.num_rows
    first = bisect_left(num_rows, num_seqs)
    if first == len(num_rows):
        raise ConfigError(
            f"num_rows: expected at most {num_rows[-1]}, got {num_seqs} (the largest bucket of "
            "the cost table)"
        )
    last = min(bisect_left(num_rows, num_seqs + most), len(num_rows) - 1)
    times_s = table.step_times_s(num_seqs, context_tokens)
    return [(min(num_rows[at] - num_seqs, most), times_s[at]) for at in range(first, last + 1)]


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


def _check_times(name: str, times: Sequence[float], *, least: float = MIN_SECONDS) -> None:
    for time in times:
        if type(time) not in (float, int) or not least <= time <= MAX_NUMBER:
            least_s = "> 0" if least else ">= 0"
            raise ConfigError(f"{name}: expected finite seconds {least_s}, got {time!r} (measured)")


def _check_names(what: str, record: object, names: set[str]) -> None:
    if not isinstance(record, dict) or set(record) != names:
        got = sorted(record) if isinstance(record, dict) else type(record).__name__
        raise ConfigError(f"{what}: expected {sorted(names)}, got {got} (written by to_json)")


def _list(name: str, values: list[_T]) -> tuple[_T, ...]:
    if not isinstance(values, list):
        raise ConfigError(f"{name}: expected a list, got {values!r} (written by to_json)")
    return tuple(values)
