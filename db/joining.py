"""Which windows belong to which result, decided on their clocks and samples alone.

asv starts one process a case and round and keeps the start of the *last* round, so windows of
earlier rounds begin before the result they belong to. Within one invocation a window therefore
belongs to the first result that ends after the window began, and the newest of its windows must
have begun after the result did: else they are those of a result that was overwritten.
"""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

# asv writes starts in milliseconds and durations with five digits.
SLACK_S = 1.0
SAMPLE_TOLERANCE_REL = 1e-6  # asv divides by the number of calls once more


@dataclass(frozen=True, slots=True)
class Span:
    """When a result's last round started and its benchmark was done."""

    result_id: int
    started_at_s: float
    ended_at_s: float


def span_of(result_id: int, started_at_ms: int | None, duration_s: float | None) -> Span:
    """Give the span of a result; what is not recorded excludes nothing."""
    if started_at_ms is None:
        return Span(result_id, -math.inf, math.inf)
    start = started_at_ms / 1000
    return Span(result_id, start, math.inf if duration_s is None else start + duration_s)


def assign(starts_s: Sequence[float], spans: Sequence[Span]) -> list[int | None]:
    """Give each window, by the start of one invocation's windows of one case, its result's id.

    `spans` are the results of the same case; a window nothing fits gets None.
    """
    in_order = sorted(spans, key=lambda span: (span.ended_at_s, span.started_at_s))
    chosen: dict[int, list[int]] = defaultdict(list)
    for index, start in enumerate(starts_s):
        fitting = (
            number for number, span in enumerate(in_order) if start <= span.ended_at_s + SLACK_S
        )
        number = next(fitting, None)
        if number is not None:
            chosen[number].append(index)
    joined: list[int | None] = [None] * len(starts_s)
    for number, indices in chosen.items():
        span = in_order[number]
        if max(starts_s[index] for index in indices) >= span.started_at_s - SLACK_S:
            for index in indices:
                joined[index] = span.result_id
    return joined


def contains(recorded: Sequence[float], wanted: Sequence[float]) -> bool:
    """Say whether every wanted sample is among the recorded ones."""
    return bool(wanted) and all(
        any(math.isclose(value, one, rel_tol=SAMPLE_TOLERANCE_REL) for one in recorded)
        for value in wanted
    )
