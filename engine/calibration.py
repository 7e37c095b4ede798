"""Measuring what a step costs here, so that an adaptive budget can weigh nodes by it.

Every bucket of rows is verified at every context length, with trees whose size alone matters:
chains of arbitrary tokens behind an arbitrary prompt, as many of them as the rows need when no
tree exceeds the node budget. Nothing is committed. This module has a clock and waits for the
device; the engine itself does neither.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import median

import torch

from engine.budget import CostTable
from engine.cost import cost_origin
from engine.decoder import Engine
from engine.errors import ConfigError
from engine.verify import chain

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
        whole batch, `N * (1 + node_budget)` rows.
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
    times = [_time_context(engine, c, num_rows, repetitions) for c in context_tokens]
    return CostTable(
        num_rows=tuple(num_rows),
        context_tokens=tuple(context_tokens),
        verify_seconds=tuple(verify_seconds for verify_seconds, _ in times),
        draft_seconds=tuple(draft_seconds for _, draft_seconds in times),
        origin=cost_origin(engine.target, engine.drafter, engine.config),
    )


def _time_context(
    engine: Engine, context: int, num_rows: Sequence[int], repetitions: int
) -> tuple[tuple[float, ...], float]:
    """Return the seconds of a verify pass for each bucket, and those of a draft pass."""
    largest = 1 + engine.config.node_budget
    most_seqs = -(-max(num_rows) // largest)
    batch = engine.prefill([_prompt(engine, context)] * most_seqs)
    verify_seconds = {}
    try:
        for rows in sorted(num_rows, reverse=True):
            num_seqs = -(-rows // largest)
            batch.keep(range(num_seqs))
            trees = [chain([0] * size) for size in _even_parts(rows, num_seqs)]
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
        _wait_for(engine.target.device)
        start_s = time.perf_counter()
        run()
        _wait_for(engine.target.device)
        if turn >= WARM_UP_RUNS:
            times.append(time.perf_counter() - start_s)
    return median(times)


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _prompt(engine: Engine, num_tokens: int) -> list[int]:
    """Return a prompt with `num_tokens` committed rows; which tokens does not matter."""
    vocab_size = engine.target.config.vocab_size
    return [token % vocab_size for token in range(num_tokens + 1)]
