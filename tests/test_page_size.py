"""Page size is called a cause, or none, only where it was tested against the noise."""

from dataclasses import replace

import numpy as np
import pytest

from db.diagnose import Status, diagnose
from db.page_size import PAGE_SIZE_MATTERS, page_size_claim
from tests.ladders import whole
from tests.recordings import COPY, SERIAL, claim_of, incident, names, on_h200, sweep_point


def measured(page_size, *process_us, **changes):
    """The serial layer at one page size from what each of its processes read."""
    point = replace(
        SERIAL,
        params=f"context=65536, page_size={page_size}",
        time_s=float(np.median(process_us)) / 1e6,
        process_samples_s=tuple((one / 1e6,) for one in process_us),
    )
    return replace(point, **changes)


def claim(*points):
    return claim_of(diagnose(on_h200(*points)), "page_size")


ONE = measured(1, 7170, 7173, 7175, 7176)


@pytest.mark.parametrize(
    ("other_us", "matters", "words"),
    [
        (7250, False, "is not the cause: it is worth at most 1.011 ["),
        (12000, True, "matters: it is worth 1.673 ["),
        (4000, True, "matters: it is worth 1.793 ["),
    ],
)
def test_a_varied_page_size_is_judged_by_what_it_is_worth(other_us, matters, words):
    other = measured(64, *(other_us * one for one in (0.999, 1.0, 1.0, 1.001)))

    found = claim(ONE, other)

    assert found.status is Status.SUPPORTED
    assert found.value == pytest.approx(max(other_us / 7174, 7174 / other_us), rel=1e-3)
    assert found.is_alarm is matters
    assert words in found.statement
    slower = "page 64 over page 1" if other_us > 7173 else "page 1 over page 64"
    assert slower in found.statement
    assert "by medians of 4 and 4 processes" in found.evidence


def test_a_difference_within_the_noise_is_inconclusive_with_its_figures():
    """Two processes each on a shared machine, as recorded: 23.7 ms at page 1, 28.3 at page 16."""
    found = claim(measured(1, 21657, 25742), measured(16, 32060, 24606))

    assert (found.status, found.is_alarm) == (Status.UNTESTED, False)
    assert "inconclusive, the largest difference is 1.196 [" in found.statement
    assert "page 16 over page 1" in found.statement
    assert "28.33 ms against 23.7 ms" in found.evidence
    assert "0 of 1 comparison beyond 1.1 times, 0 within" in found.evidence


@pytest.mark.parametrize("process_us", [(12000.0,), ()])
def test_a_process_a_side_tests_nothing(process_us):
    other = replace(measured(64, 12000.0), process_samples_s=tuple((one,) for one in process_us))

    found = claim(ONE, other)

    assert found.status is Status.UNTESTED
    assert "inconclusive, the largest difference is 1.673 times" in found.statement
    assert "of the 2 needed" in found.evidence


def at_context(context, pair):
    return [
        replace(point, params=point.params.replace("65536", str(context)), context_tokens=context)
        for point in pair
    ]


def test_one_group_that_differs_by_chance_is_no_cause_among_many():
    lucky = [measured(1, 11900, 12600, 12100), measured(64, 9800, 10300, 10000)]
    rng = np.random.default_rng(2)
    nothing = [
        point
        for context in range(40)
        for point in at_context(
            context + 1, [measured(size, *10000 * rng.normal(1, 0.04, 3)) for size in (1, 64)]
        )
    ]

    alone, among = claim(*lucky), claim(*lucky, *nothing)

    assert (alone.status, alone.is_alarm) == (Status.SUPPORTED, True)
    assert (among.status, among.is_alarm) == (Status.UNTESTED, False)
    assert "0 of 41 comparisons" in among.evidence


def test_chance_is_called_a_cause_as_seldom_as_promised():
    rng = np.random.default_rng(7)
    alarms = 0
    for _ in range(400):
        points = []
        for context in range(1, 7):
            edge = [PAGE_SIZE_MATTERS, 1.0]  # the largest difference that is not to be called
            pair = [
                measured(size, *5000 * scale * np.exp(0.1 * rng.standard_normal(4)))
                for size, scale in zip((1, 64), edge, strict=True)
            ]
            points += at_context(context, pair)
        alarms += page_size_claim(points, points).is_alarm

    assert alarms / 400 <= 0.05


def test_every_two_page_sizes_are_compared():
    sizes = {1: 8000, 16: 7600, 64: 9000}  # either is within the margin of page 1
    points = [
        measured(size, *(us * one for one in (0.999, 1.0, 1.001))) for size, us in sizes.items()
    ]

    found = claim(*points)

    assert found.is_alarm
    assert "page 64 over page 16" in found.statement
    assert "of 3 comparisons" in found.evidence


def test_one_open_comparison_keeps_page_size_from_being_cleared():
    close = at_context(32768, [measured(1, 7000, 7010), measured(64, 7020, 7030)])
    noisy = [measured(1, 7000, 9000), measured(64, 7100, 8800)]

    assert "is not the cause" in claim(*close).statement
    found = claim(*close, *noisy)
    assert "inconclusive" in found.statement
    assert "0 of 2 comparisons beyond 1.1 times, 1 within" in found.evidence


def test_rungs_of_a_ladder_are_compared_by_the_slower_one_and_raise_no_alarm():
    worth = {"read_once": 2.5, "split": 22.0, "packed": 1.3, "page_64": 0.6, "in_order": 1.0}

    found = claim(SERIAL, *whole(worth))

    assert found.value == pytest.approx(1 / 0.6, rel=0.02)
    assert found.unit == "times, the slower over the faster page size"
    assert "page 64 over page 1, " in found.statement
    assert "2 of 2 comparisons beyond 1.1 times" in found.evidence
    assert not found.is_alarm
    assert claim(ONE, measured(64, 4000, 4001, 4002), *whole(worth)).is_alarm


def peer(implementation, page_size, *process_us):
    params = f"context=65536, page_size={page_size}, implementation='{implementation}'"
    return measured(page_size, *process_us, benchmark="peers.Contexts.time_cold", params=params)


def test_what_page_size_costs_a_peer_is_no_claim_of_ours():
    theirs = [peer("vllm_triton", 1, 9000, 9001, 9002), peer("vllm_triton", 64, 4000, 4001, 4002)]
    ours = [peer("triton_split", 1, 7000, 7001, 7002), peer("triton_split", 64, 7000, 7001, 7003)]

    found = diagnose(on_h200(*theirs, *ours))

    assert "0 of 1 comparison beyond 1.1 times, 1 within" in claim_of(found, "page_size").evidence
    assert claim_of(found, "page_size").statement.startswith("page_size is not the cause")
    assert not any("vllm" in (claim.case or "") for claim in found.claims)
    assert len(found.cases) == 4
    assert "page_size" not in names(diagnose(on_h200(*theirs)).claims)


def test_two_versions_of_a_benchmark_are_never_compared():
    older = replace(ONE, version="1")
    newer = measured(64, 11990, 12000, 12010, version="2")

    found = claim(older, newer)

    assert found.status is Status.UNTESTED
    assert "it was not varied alone" in found.statement
    assert "matters" in claim(replace(older, version="2"), newer).statement


def test_page_sizes_at_different_contexts_test_nothing():
    (other,) = at_context(32768, [measured(64, 3600, 3601)])

    found = claim(ONE, other)

    assert (found.status, found.value) == (Status.UNTESTED, 2.0)
    assert "it was not varied alone" in found.statement


def test_external_times_without_samples_are_inconclusive():
    points = (
        sweep_point(65536, 357),
        sweep_point(65536, 500, params="context=65536, page_size=64"),
    )

    found = claim_of(diagnose(replace(incident(), points=points)), "page_size")

    assert "inconclusive, the largest difference is 1.401 times" in found.statement
    assert "0 processes a side of the 2 needed" in found.evidence


def test_a_fast_case_needs_no_word_on_page_size():
    assert "page_size" not in names(diagnose(on_h200(COPY)).claims)
