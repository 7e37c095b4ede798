"""Cases that differ in their context: lines, and the points that leave them."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from db.diagnose import EvidencePoint, diagnose
from db.line_fit import fit_line, off_the_line
from tests.recordings import (
    ROW_BYTES,
    SWEEP,
    SWEEP_MS,
    claim_of,
    incident,
    layer,
    names,
    on_h200,
    sweep_point,
)

SPLIT_US = {32768: 65.4, 65536: 101.5, 131072: 170.4, 189440: 224.6}
SERIAL_US = {32768: 3595, 65536: 7173, 131072: 14336, 189440: 20726}


def fitted(times_us):
    contexts = np.array(list(times_us), dtype=float)
    return fit_line("layer", contexts * ROW_BYTES, np.array(list(times_us.values())) / 1e6)


def test_measured_kernels_are_fitted_with_their_intervals():
    split, serial = fitted(SPLIT_US), fitted(SERIAL_US)

    assert split.refused is None
    assert split.n_points == 4
    assert split.t0_ms == pytest.approx(0.032, abs=0.001)
    assert split.t0_low_ms < split.t0_ms < split.t0_high_ms
    assert split.bandwidth_low_gb_s < split.bandwidth_gb_s < split.bandwidth_high_gb_s
    assert split.bandwidth_gb_s == pytest.approx(1110, rel=0.02)
    assert serial.refused is None
    assert serial.bandwidth_gb_s == pytest.approx(10.5, rel=0.01)


def test_a_line_through_good_data_is_a_claim_and_no_alarm():
    points = [
        layer(
            us,
            (99, 25, 501, 81, 18, 29),
            params=f"context={c}, page_size=16",
            context_tokens=c,
            kv_bytes=c * ROW_BYTES,
            bytes=c * ROW_BYTES + 10**5,
        )
        for c, us in SPLIT_US.items()
    ]

    found = diagnose(on_h200(*points))

    assert found.fit.label == "attention.Tree.time_layer(page_size=16)"
    assert "do not grow with context" in claim_of(found, "context_fit").statement
    assert names(found.claims).isdisjoint({"excess_over_line", "suspect_point"})


@settings(max_examples=100, deadline=None)
@given(st.floats(0.0, 1.0), st.floats(1e9, 5e12), st.integers(4, 9))
def test_an_exact_line_is_recovered_whatever_its_numbers(t0_ms, bandwidth, n):
    num_bytes = np.geomspace(1e7, 2e9, n)

    fit = fit_line("exact", num_bytes, t0_ms / 1e3 + num_bytes / bandwidth)

    assert fit.refused is None
    assert fit.t0_ms == pytest.approx(t0_ms, abs=1e-6 + 1e-6 * 1e10 / bandwidth)
    assert fit.bandwidth_gb_s == pytest.approx(bandwidth / 1e9, rel=1e-6)


def test_intervals_of_noisy_lines_cover_the_truth_as_often_as_they_say():
    rng = np.random.default_rng(1)
    num_bytes = np.array([1, 32, 64, 128, 185]) * 1e6
    covered, fitted_lines = np.zeros(2), 0
    for _ in range(800):
        times = (20e-6 + num_bytes / 2e12) * (1 + 0.01 * rng.standard_normal(5))
        fit = fit_line("noisy", num_bytes, times)
        if fit.refused is None:
            fitted_lines += 1
            covered += [
                fit.t0_low_ms <= 0.02 <= fit.t0_high_ms,
                fit.bandwidth_low_gb_s <= 2000 <= (fit.bandwidth_high_gb_s or math.inf),
            ]

    assert fitted_lines >= 790
    assert (covered / fitted_lines >= 0.935).all()
    assert (covered / fitted_lines <= 0.97).all()


@pytest.mark.parametrize(
    ("times", "reason"),
    [
        ([1.0, 2.0, 3.0], "expected 4 contexts or more, got 3"),
        ([9.0, 8.0, 7.0, 6.0], "does not grow"),
        ([1.5, 2.5, 4.5, 8.5, 16.5], None),
        ([0.5, 1.5, 3.5, 7.5, 15.5], "t0 < 0"),
        ([1.0, 1.5, 2.5, 6.5, 40.0], "t0 < 0"),
        ([4.0, 4.5, 5.6, 8.4, 16.8], "the points bend"),
        ([4.0, 9.0, 6.0, 10.0, 18.0], "off the best line"),
    ],
)
def test_a_line_is_refused_where_it_does_not_fit(times, reason):
    num_bytes = 2.0 ** np.arange(len(times)) * 1e8

    fit = fit_line("shape", num_bytes, np.array(times))

    assert (fit.refused is None) == (reason is None)
    assert reason is None or reason in fit.refused


def test_one_point_off_the_line_is_found_wherever_it_lies():
    num_bytes = np.array([1.0, 2.0, 3.0, 5.0, 8.0]) * 1e8
    line = 1e-3 + num_bytes / 1e11

    for index in range(5):
        times = line.copy()
        times[index] *= 1.5
        off = off_the_line(num_bytes, times)

        assert off.index == index
        assert off.ratio == pytest.approx(1.5)
    assert off_the_line(num_bytes, line) is None
    assert off_the_line(num_bytes, line * [1.0, 1.1, 0.9, 1.1, 0.9]) is None


def test_only_cases_that_differ_in_context_alone_share_a_line():
    points = [
        sweep_point(c, ms * factor, params=f"context={c}, page_size={page}")
        for page, factor in ((1, 1.0), (64, 0.5))
        for c, ms in SWEEP_MS.items()
    ]

    found = diagnose(replace(incident(), points=tuple(points)))

    assert [fit.label for fit in found.fits] == [f"{SWEEP}(page_size=1)", f"{SWEEP}(page_size=64)"]
    assert {fit.n_points for fit in found.fits} == {5}


def test_versions_of_a_line_over_context_are_told_apart():
    points = [
        layer(us * factor, (99, 25, 501, 81, 18, 29), params=f"context={c}", version=version)
        for version, factor in (("1", 1.0), ("0123456789abcdef", 3.0))
        for c, us in {32768: 65.4, 65536: 101.5, 131072: 170.4, 189440: 224.6}.items()
    ]
    points = [
        replace(point, context_tokens=int(point.settings["context"]), kv_bytes=None)
        for point in points
    ]
    points = [replace(point, bytes=point.context_tokens * 1152) for point in points]

    labels = [fit.label for fit in diagnose(on_h200(*points)).fits]

    assert labels == [
        "attention.Tree.time_layer version 1",
        "attention.Tree.time_layer version 01234567",
    ]


def test_cases_without_a_time_or_bytes_are_no_trouble():
    bare = EvidencePoint("tree.Tree.time_build", "", None, 0.001, 3)

    found = diagnose(replace(incident(), points=(bare, replace(bare, time_s=0.0))))

    assert len(found.cases) == 1
    assert (found.cases[0].effective_gb_s, found.cases[0].floor_ratio) == (None, None)
    assert found.claims == ()
    assert found.fit is None
