"""Measuring what a step costs here, so that an adaptive budget can weigh nodes by it.

Every bucket of rows is verified and committed at every context length, with trees whose size alone
matters: as many of them as the rows need when none has more nodes than a sequence decoding alone.
Tokens are random, so that rows hit different experts; no two prompts begin alike, so that none
shares its pages. Every commit is taken back, and hardly a random token is accepted: a commit costs
more for each that is, which is left out. This module has a clock and waits for the device; the
engine itself does neither.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import TypeVar

import torch

from engine.batch import StepBatch
from engine.budget import CostOrigin, CostTable
from engine.cost import cost_origin
from engine.decoder import Engine
from engine.device import wait_for
from engine.draft_tree import DraftTree
from engine.errors import ConfigError

WARM_UP_RUNS = 2  # the first compiles, the second is the first like all others
REPETITIONS = 20
_T = TypeVar("_T")


def measure_costs(
    engine: Engine,
    *,
    num_rows: Sequence[int],
    context_tokens: Sequence[int],
    repetitions: int = REPETITIONS,
) -> CostTable:
    """Time the stages of a step and return the table for `engine`.

    Parameters
    ----------
    engine : Engine
        Its mode drafts, and what it builds for one sequence is what building costs: give it the
        node budget that is to be weighed. Its cache holds `context_tokens` rows of every tree
        while this runs.
    num_rows : ascending
        Ends of the buckets: rows of a verify pass, roots included. The last one should cover a
        whole batch, `N * (1 + engine.most_nodes(1))` rows.
    context_tokens : ascending
        Committed tokens of each sequence; two at least tell how cost grows with them.
    repetitions : int
        Runs of each stage; the table keeps their medians.

    Raises
    ------
    ConfigError
        The engine does not draft, or the grid cannot be measured or is none.
    """
    if engine.drafter is None:
        raise ConfigError(
            f"mode: expected one that drafts, got {engine.config.mode!r} (nothing to weigh)"
        )
    origin = cost_origin(engine.target, engine.drafter, engine.config)
    _check_grid(engine, num_rows, context_tokens, repetitions, origin)
    horizon = engine.drafter.config.horizon
    times = [_time_context(engine, c, num_rows, repetitions, horizon) for c in context_tokens]
    return CostTable(
        num_rows=tuple(num_rows),
        context_tokens=tuple(context_tokens),
        draft_seconds=tuple(one.draft_s for one in times),
        build_seconds=tuple(one.build_s for one in times),
        verify_seconds=tuple(one.verify_s for one in times),
        commit_seconds=tuple(one.commit_s for one in times),
        origin=origin,
    )


def _check_grid(
    engine: Engine,
    num_rows: Sequence[int],
    context_tokens: Sequence[int],
    repetitions: int,
    origin: CostOrigin,
) -> None:
    """Refuse what no table could be made of before any time is spent on it."""
    by_context = (1.0,) * len(context_tokens)
    by_rows = ((1.0,) * len(num_rows),) * len(context_tokens)
    grids = (tuple(num_rows), tuple(context_tokens))
    CostTable(*grids, by_context, by_context, by_rows, by_rows, origin)
    longest = engine.config.max_context - 1
    if context_tokens[-1] > longest:
        raise ConfigError(
            f"context_tokens: expected at most {longest}, got {context_tokens[-1]} (with a root "
            "behind them max_context of the engine)"
        )
    if type(repetitions) is not int or repetitions < 1:
        raise ConfigError(
            f"repetitions: expected an integer >= 1, got {repetitions!r} (the table keeps medians)"
        )


@dataclass(frozen=True, slots=True)
class _Times:
    """Median seconds of each stage at one context length."""

    draft_s: float
    build_s: float
    verify_s: tuple[float, ...]  # of each bucket
    commit_s: tuple[float, ...]


def _time_context(
    engine: Engine, context: int, num_rows: Sequence[int], repetitions: int, horizon: int
) -> _Times:
    """Time all stages: verify and commit for each bucket, draft and build for one sequence."""
    largest = 1 + engine.most_nodes(1)
    most_seqs = -(-max(num_rows) // largest)
    batch = engine.prefill([_prompt(engine, context, n) for n in range(most_seqs)])
    by_rows = {}
    try:
        for rows in sorted(num_rows, reverse=True):
            num_seqs = -(-rows // largest)
            batch.keep(range(num_seqs))
            parts = _even_parts(rows, num_seqs)
            trees = [_tree(engine, n, size, horizon) for n, size in enumerate(parts)]
            by_rows[rows] = _verify_and_commit(engine, batch, trees, repetitions)
        batch.keep([0])
        logits = engine.draft(batch)
        draft_s = _seconds(engine, partial(engine.draft, batch), repetitions)
        build_s = _seconds(engine, partial(engine.build, batch, logits), repetitions)
    finally:
        batch.keep([])
    verify_s, commit_s = zip(*(by_rows[rows] for rows in num_rows), strict=True)
    return _Times(draft_s, build_s, verify_s, commit_s)


def _verify_and_commit(
    engine: Engine, batch: StepBatch, trees: Sequence[DraftTree], repetitions: int
) -> tuple[float, float]:
    """Return the median seconds of a verify pass and of its commit, which is taken back."""
    start, times = engine.snapshot(batch), []
    for _ in range(WARM_UP_RUNS + repetitions):
        verified, verify_s = _timed(engine, partial(engine.verify, batch, trees))
        _, commit_s = _timed(engine, partial(engine.commit, batch, trees, verified))
        engine.rewind(batch, start)
        times.append((verify_s, commit_s))
    verify, commit = zip(*times[WARM_UP_RUNS:], strict=True)
    return median(verify), median(commit)


def _even_parts(total: int, count: int) -> list[int]:
    return [total // count + (part < total % count) for part in range(count)]


def _seconds(engine: Engine, run: Callable[[], object], repetitions: int) -> float:
    """Return the median wall time of `run`."""
    times = [_timed(engine, run)[1] for _ in range(WARM_UP_RUNS + repetitions)]
    return median(times[WARM_UP_RUNS:])


def _timed(engine: Engine, run: Callable[[], _T]) -> tuple[_T, float]:
    """Return what `run` gives and its wall time, the device idle at both ends."""
    wait_for(engine.target.device)
    start_s = time.perf_counter()
    result = run()
    wait_for(engine.target.device)
    return result, time.perf_counter() - start_s


def _prompt(engine: Engine, num_tokens: int, number: int) -> list[int]:
    """Return a prompt with `num_tokens` committed rows; another number begins otherwise."""
    first = number % engine.target.config.vocab_size
    return [first, *_random_tokens(engine, num_tokens, number)]


def _tree(engine: Engine, number: int, size: int, horizon: int) -> DraftTree:
    """Return a tree of `size` rows: chains of up to `horizon` nodes side by side."""
    nodes = torch.arange(size, dtype=torch.int32)
    depths = torch.where(nodes > 0, (nodes - 1) % horizon + 1, 0)
    return DraftTree(
        token_ids=torch.tensor(_random_tokens(engine, size, number)),
        parents=torch.where(depths == 1, 0, nodes - 1),
        depths=depths,
        path_log_probs=torch.zeros(size, dtype=torch.float64),
    )


def _random_tokens(engine: Engine, count: int, seed: int) -> list[int]:
    source = random.Random(seed)  # noqa: S311 - any tokens will do, but always the same
    return source.choices(range(engine.target.config.vocab_size), k=count)
