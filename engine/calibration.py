"""Measuring what a step costs here, so that an adaptive budget can weigh nodes by it.

Every bucket of rows is verified at every context length, with trees whose size alone matters:
as many of them as the rows need when none has more nodes than a sequence decoding alone. Tokens
are random, so that rows hit different experts; no two prompts begin alike, so that none shares its
pages. Nothing is committed. This module has a clock and waits for the device; the engine itself
does neither.
"""

import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

import torch

from engine.budget import CostOrigin, CostTable
from engine.cost import cost_origin
from engine.decoder import Engine
from engine.device import wait_for
from engine.draft_tree import DraftTree
from engine.errors import ConfigError

WARM_UP_RUNS = 2  # the first compiles, the second is the first like all others
REPETITIONS = 20


def measure_costs(
    engine: Engine,
    *,
    num_rows: Sequence[int],
    context_tokens: Sequence[int],
    repetitions: int = REPETITIONS,
) -> CostTable:
    """Time draft and verify passes and return the table for `engine`.

    Parameters
    ----------
    engine : Engine
        Its mode drafts. Its cache holds `context_tokens` rows of every tree while this runs.
    num_rows : ascending
        Ends of the buckets: rows of a verify pass, roots included. The last one should cover a
        whole batch, `N * (1 + engine.most_nodes(1))` rows.
    context_tokens : ascending
        Committed tokens of each sequence; two at least tell how cost grows with them.
    repetitions : int
        Runs of each pass; the table keeps their medians.

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
        verify_seconds=tuple(verify_seconds for verify_seconds, _ in times),
        draft_seconds=tuple(draft_seconds for _, draft_seconds in times),
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
    row = (1.0,) * len(num_rows)
    drafts = (1.0,) * len(context_tokens)
    CostTable(tuple(num_rows), tuple(context_tokens), (row,) * len(drafts), drafts, origin)
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


def _time_context(
    engine: Engine, context: int, num_rows: Sequence[int], repetitions: int, horizon: int
) -> tuple[tuple[float, ...], float]:
    """Return the seconds of a verify pass for each bucket, and those of a draft pass."""
    largest = 1 + engine.most_nodes(1)
    most_seqs = -(-max(num_rows) // largest)
    batch = engine.prefill([_prompt(engine, context, n) for n in range(most_seqs)])
    verify_seconds = {}
    try:
        for rows in sorted(num_rows, reverse=True):
            num_seqs = -(-rows // largest)
            batch.keep(range(num_seqs))
            parts = _even_parts(rows, num_seqs)
            trees = [_tree(engine, n, size, horizon) for n, size in enumerate(parts)]
            run = partial(engine.verify, batch, trees)
            verify_seconds[rows] = _seconds(engine, run, repetitions)
        batch.keep([0])
        draft_seconds = _seconds(engine, partial(engine.draft, batch), repetitions)
    finally:
        batch.keep([])
    return tuple(verify_seconds[rows] for rows in num_rows), draft_seconds


def _even_parts(total: int, count: int) -> list[int]:
    return [total // count + (part < total % count) for part in range(count)]


def _seconds(engine: Engine, run: Callable[[], object], repetitions: int) -> float:
    """Return the median wall time of `run`, the device idle at both ends."""
    times = []
    for turn in range(WARM_UP_RUNS + repetitions):
        wait_for(engine.target.device)
        start_s = time.perf_counter()
        run()
        wait_for(engine.target.device)
        if turn >= WARM_UP_RUNS:
            times.append(time.perf_counter() - start_s)
    return median(times)


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
