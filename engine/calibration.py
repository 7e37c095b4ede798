"""Measuring what a step costs here, so that an adaptive budget can weigh nodes by it.

What is timed is a whole step of one sequence with a tree of so many rows: stages overlap, so that
their sum is more. All buckets take turns, since a host that is slow for a while is slow for all of
them. Rows that one tree cannot have are those of several sequences, less what these cost besides
their rows. Tokens are random, so that rows hit different experts; no two prompts begin alike, so
that none shares its pages. Every step is taken back, and hardly a random token is accepted: a
commit costs more for each that is, which is left out. This module has a clock and waits for the
device; the engine itself does neither.
"""

import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import islice
from statistics import median

from engine.batch import StepBatch
from engine.budget import CostOrigin, CostTable
from engine.cost import cost_origin
from engine.decoder import Engine
from engine.device import wait_for
from engine.errors import ConfigError
from engine.node_pool import tree_searches

WARM_UP_RUNS = 2  # the first compiles, the second is the first like all others
REPETITIONS = 20


def measure_costs(
    engine: Engine,
    *,
    num_rows: Sequence[int],
    context_tokens: Sequence[int],
    repetitions: int = REPETITIONS,
) -> CostTable:
    """Time steps and return the table for `engine`.

    Parameters
    ----------
    engine : Engine
        Its mode drafts, and its node budget is the most that one sequence may get. Its cache holds
        `context_tokens` rows of every sequence while this runs.
    num_rows : ascending
        Ends of the buckets: rows of a verify pass, roots included. The last one should cover a
        whole batch, `N * (1 + engine.most_nodes(1))` rows.
    context_tokens : ascending
        Committed tokens of each sequence; two at least tell how cost grows with them.
    repetitions : int
        Steps of each bucket; the table keeps their medians.

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
    times = [_time_context(engine, c, num_rows, repetitions) for c in context_tokens]
    step_s, sequence_s = zip(*times, strict=True)
    return CostTable(tuple(num_rows), tuple(context_tokens), step_s, sequence_s, origin)


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
    CostTable(tuple(num_rows), tuple(context_tokens), by_rows, by_context, origin)
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
    engine: Engine, context: int, num_rows: Sequence[int], repetitions: int
) -> tuple[tuple[float, ...], float]:
    """Time steps of each bucket; return what they cost one sequence, and what a further one adds.

    The latter is told by steps of as many rows, in one tree or a root for each sequence.
    """
    largest = 1 + engine.most_nodes(1)
    most_seqs = -(-max(num_rows) // largest)
    few_rows = min(most_seqs, largest)
    batch = engine.prefill([_prompt(engine, context, n) for n in range(most_seqs)])
    try:
        several = _time_steps(engine, batch, [n for n in num_rows if n > largest], repetitions)
        batch.keep(range(few_rows))
        apart_s = _time_steps(engine, batch, [few_rows], repetitions)[few_rows]
        batch.keep([0])
        rows = {n for n in num_rows if n <= largest} | {few_rows}
        alone = _time_steps(engine, batch, sorted(rows), repetitions)
    finally:
        batch.keep([])
    if few_rows == 1:
        return tuple(alone[n] for n in num_rows), 0.0
    further_s = max(0.0, apart_s - alone[few_rows]) / (few_rows - 1)
    others_s, least_s = (most_seqs - 1) * further_s, alone[few_rows]
    several = {n: max(least_s, time_s - others_s) for n, time_s in several.items()}
    return tuple((alone | several)[n] for n in num_rows), further_s


def _time_steps(
    engine: Engine, batch: StepBatch, num_rows: Sequence[int], repetitions: int
) -> dict[int, float]:
    """Return the median seconds of steps of so many rows, in turns; all are taken back."""
    start, count = engine.snapshot(batch), len(batch.sequences)
    times: dict[int, list[float]] = {rows: [] for rows in num_rows}
    for _ in range(WARM_UP_RUNS + repetitions):
        for rows, found in times.items():
            found.append(_seconds(engine, partial(_step, engine, batch, _even_parts(rows, count))))
            engine.rewind(batch, start)
    return {rows: median(found[WARM_UP_RUNS:]) for rows, found in times.items()}


def _step(engine: Engine, batch: StepBatch, tree_sizes: Sequence[int]) -> None:
    """Run a step with trees of these sizes, searched no farther."""
    logits = engine.draft(batch)
    if logits is None:
        return  # a mode that drafts has some
    roots = [sequence.root_token for sequence in batch.sequences]
    is_chain = engine.config.mode == "dflash"
    searches = tree_searches(logits, roots, engine.most_nodes(1), is_chain=is_chain)
    trees = []
    for search, size in zip(searches, tree_sizes, strict=True):
        for _ in islice(search, size - 1):
            pass  # each is found
        trees.append(search.tree(size - 1))
    engine.commit(batch, trees, engine.verify(batch, trees))


def _even_parts(total: int, count: int) -> list[int]:
    return [total // count + (part < total % count) for part in range(count)]


def _seconds(engine: Engine, run: Callable[[], None]) -> float:
    """Return the wall time of `run`, the device idle at both ends."""
    wait_for(engine.target.device)
    start_s = time.perf_counter()
    run()
    wait_for(engine.target.device)
    return time.perf_counter() - start_s


def _prompt(engine: Engine, num_tokens: int, number: int) -> list[int]:
    """Return a prompt with `num_tokens` committed rows; another number begins otherwise."""
    first = number % engine.target.config.vocab_size
    return [first, *_random_tokens(engine, num_tokens, number)]


def _random_tokens(engine: Engine, count: int, seed: int) -> list[int]:
    source = random.Random(seed)  # noqa: S311 - any tokens will do, but always the same
    return source.choices(range(engine.target.config.vocab_size), k=count)
