"""Charts say what the frames say: order, units, levels, what is missing, what got worse."""

# ruff: noqa: RUF001 - signs of change and factors are asserted as they are printed

from typing import Any

import numpy as np
import pandas as pd
import pytest
import vl_convert
from hypothesis import given, settings
from hypothesis import strategies as st

from dashboard import chart_layers, charts
from dashboard.chart_frames import HistoryView, marked_changes, plotted, segments
from dashboard.theme import CHANGE_COLOURS, STATUS_STYLES
from dashboard.units import DisplayUnit, commit_text
from db.queries import EXCLUDED

MS = DisplayUnit(1e-3, "ms")
VIEW = HistoryView(quantity="time", unit=MS)


def sha(index: int) -> str:
    return f"{index:040x}"[::-1]


def history_frame(values: list[float], **columns: Any) -> pd.DataFrame:
    """Build a history as `db.queries.history` gives it, one commit a value."""
    n = len(values)
    frame = pd.DataFrame(
        {
            "order": range(n),
            "commit": [sha(index) for index in range(n)],
            "commit_date": pd.date_range("2026-01-01", periods=n, tz="UTC"),
            "subject": [f"engine: change {index}" for index in range(n)],
            "branch": "main",
            "external": False,
            "dirty": False,
            "run_id": "run-1",
            "started_at": pd.Timestamp("2026-02-01", tz="UTC"),
            "value": values,
            "q25": [value * 0.99 for value in values],
            "q75": [value * 1.01 for value in values],
            "ci_low": values,
            "ci_high": values,
            "n": 10,
            "status": "ok",
            "epoch": 0,
            "environment": None,
        }
    )
    return frame.assign(**columns)


def change_frame(*changes: tuple[int, float, float]) -> pd.DataFrame:
    """Build change points as `db.queries.change_points` gives them, at places of `history_frame`."""
    return pd.DataFrame(
        [
            {
                "commit": sha(order),
                "before": before,
                "after": after,
                "relative_change": (after - before) / before,
                "p_value": 1e-6,
                "cause": "code",
            }
            for order, before, after in changes
        ],
        columns=["commit", "before", "after", "relative_change", "p_value", "cause"],
    )


def spec_of(chart: Any) -> dict[str, Any]:
    return chart.to_dict()


def rows_of(spec: dict[str, Any], layer: dict[str, Any]) -> list[dict[str, Any]]:
    data = layer.get("data", spec.get("data"))
    return data["values"] if "values" in data else spec["datasets"][data["name"]]


def layers_of(spec: dict[str, Any], mark: str) -> list[dict[str, Any]]:
    return [layer for layer in spec["layer"] if layer["mark"]["type"] == mark]


def svg_of(chart: Any) -> str:
    """Compile and draw with Vega itself: what it cannot parse fails here."""
    return vl_convert.vegalite_to_svg(chart.to_dict())


def test_results_stand_in_commit_order_whatever_their_dates_are():
    dates = pd.to_datetime(["2026-03-01", "2026-01-01", "2026-02-01"], utc=True)
    frame = history_frame([1e-3, 2e-3, 3e-3], commit_date=dates).sample(frac=1, random_state=1)

    spec = spec_of(charts.history(frame, change_frame(), VIEW))

    points = layers_of(spec, "point")[0]
    assert points["encoding"]["x"]["field"] == "order"
    assert points["encoding"]["x"]["type"] == "quantitative"
    assert [row["shown"] for row in rows_of(spec, points)] == pytest.approx([1.0, 2.0, 3.0])


def test_axis_titles_carry_unit_and_direction():
    throughput = HistoryView("rate", DisplayUnit(1.0, "tokens/s"), lower_is_better=False)

    assert VIEW.y_title == "time (ms) · lower is better"
    assert throughput.y_title == "rate (tokens/s) · higher is better"
    assert "time (ms) · lower is better" in svg_of(
        charts.history(history_frame([1e-3, 2e-3]), change_frame(), VIEW)
    )


def test_failed_and_skipped_results_are_drawn_apart_and_leave_a_gap():
    frame = history_frame([1e-3] * 5)
    frame.loc[[1, 3], ["value", "q25", "q75"]] = np.nan
    frame.loc[1, "status"], frame.loc[3, "status"] = "failed", "skipped"

    spec = spec_of(charts.history(frame, change_frame(), VIEW))

    missing = layers_of(spec, "point")[1]
    assert missing["transform"][0]["filter"]["oneOf"] == ["failed", "skipped"]
    assert "height" in str(missing["encoding"]["y"])
    assert layers_of(spec, "line")[0]["mark"]["invalid"] == "break-paths-filter-domains"
    shapes = dict(
        zip(
            missing["encoding"]["shape"]["scale"]["domain"],
            missing["encoding"]["shape"]["scale"]["range"],
            strict=True,
        )
    )
    assert shapes["failed"] != shapes["skipped"] != shapes["ok"]


def test_every_status_differs_in_colour_and_in_shape():
    assert set(STATUS_STYLES) == {"ok", "single-sample", EXCLUDED, *chart_layers.MISSING}
    assert len({style.colour for style in STATUS_STYLES.values()}) == len(STATUS_STYLES)
    assert len({style.shape for style in STATUS_STYLES.values()}) == len(STATUS_STYLES)


def test_levels_are_those_of_the_database_and_cover_the_series():
    frame = plotted(history_frame([1e-3] * 4 + [2e-3] * 4), VIEW)
    changes = marked_changes(change_frame((4, 1e-3, 2e-3)), frame, VIEW)

    table = segments(frame, changes)

    assert table["start"].tolist() == [0, 4]
    assert table["end"].tolist() == [4, 7]
    assert table["level"].tolist() == pytest.approx([1.0, 2.0])


SIXTY_RESULTS = plotted(history_frame([1e-3] * 60), VIEW)


@settings(deadline=None)  # a busy machine is no mistake
@given(st.lists(st.integers(1, 58), unique=True, max_size=8))
def test_segments_meet_without_gap_or_overlap(orders):
    changes = marked_changes(
        change_frame(*((order, 1e-3, 2e-3) for order in orders)), SIXTY_RESULTS, VIEW
    )

    table = segments(SIXTY_RESULTS, changes)

    if not orders:
        assert table.empty
        return
    assert table["start"].iloc[0] == 0
    assert table["end"].iloc[-1] == 59
    assert table["start"].tolist()[1:] == table["end"].tolist()[:-1] == sorted(orders)


@pytest.mark.parametrize(
    ("after", "lower_is_better", "meaning", "label"),
    [
        (1.1e-3, True, "worse", "▲ +10.0 %"),
        (0.9e-3, True, "better", "▼ −10.0 %"),
        (1.1e-3, False, "better", "▲ +10.0 %"),
        (0.9e-3, False, "worse", "▼ −10.0 %"),
    ],
)
def test_a_change_is_judged_by_the_direction_of_its_metric(after, lower_is_better, meaning, label):
    view = HistoryView("time", MS, lower_is_better=lower_is_better)

    frame = plotted(history_frame([1e-3] * 4), view)

    changes = marked_changes(change_frame((2, 1e-3, after)), frame, view)

    assert changes["colour"].tolist() == [CHANGE_COLOURS[meaning]]
    assert changes["label"].tolist() == [label]


def test_a_change_point_is_named_with_its_first_commit_and_cause():
    svg = svg_of(charts.history(history_frame([1e-3] * 8), change_frame((4, 1e-3, 2e-3)), VIEW))

    assert "▲ +100.0 %" in svg
    assert "cause: code" in svg
    assert f"first commit of the new level: {commit_text(sha(4))}" in svg


def test_close_changes_share_their_room_and_the_largest_keeps_its_label():
    frame = plotted(history_frame([1e-3] * 100), VIEW)
    close = change_frame((50, 1e-3, 1.1e-3), (52, 1.1e-3, 2e-3), (90, 2e-3, 1e-3))

    changes = marked_changes(close, frame, VIEW)

    assert changes["label"].tolist() == ["", "▲ +81.8 %", "▼ −50.0 %"]
    assert changes["change"].tolist()[0] == "▲ +10.0 %"  # hovering still tells it


def test_epochs_are_drawn_only_where_the_environment_changed():
    one = spec_of(charts.history(history_frame([1e-3] * 6), change_frame(), VIEW))
    two_environments = history_frame(
        [1e-3] * 6, epoch=[0, 0, 0, 1, 1, 1], environment=["driver 580"] * 3 + ["driver 590"] * 3
    )
    chart = charts.history(two_environments, change_frame(), VIEW)
    two = spec_of(chart)

    assert not layers_of(one, "rect")
    (shade,) = layers_of(two, "rect")
    assert [(row["start"], row["end"]) for row in rows_of(two, shade)] == [(3, 5)]
    assert "driver 590" in svg_of(chart)


def test_a_returning_environment_opens_no_gap_between_epochs():
    frame = history_frame([1e-3] * 6, epoch=[0, 0, 1, 1, 0, 0], environment=list("aabbaa"))

    (shade,) = layers_of(spec := spec_of(charts.history(frame, change_frame(), VIEW)), "rect")

    assert [(row["start"], row["end"]) for row in rows_of(spec, shade)] == [(2, 4)]


def test_noise_looks_like_noise():
    quiet = history_frame([1e-3, 1.001e-3, 0.999e-3])

    spec = spec_of(charts.history(quiet, change_frame(), VIEW))

    low, high = layers_of(spec, "point")[0]["encoding"]["y"]["scale"]["domain"]
    assert low <= 0.95
    assert high >= 1.05


def test_one_wide_quartile_does_not_flatten_a_long_history():
    frame = history_frame([1e-3] * 200)
    frame.loc[50, "q75"] = 1.0

    spec = spec_of(charts.history(frame, change_frame(), VIEW))

    assert layers_of(spec, "point")[0]["encoding"]["y"]["scale"]["domain"][1] < 2


def test_a_value_is_never_cut_off():
    frame = history_frame([1e-3] * 200)
    frame.loc[50, "value"] = 1.0

    spec = spec_of(charts.history(frame, change_frame(), VIEW))

    assert layers_of(spec, "point")[0]["encoding"]["y"]["scale"]["domain"][1] > 1000


def test_a_log_axis_takes_positive_values_and_drops_impossible_quartiles():
    frame = history_frame([1e-3, 1e-2, 1e-1])
    frame.loc[0, "q25"] = 0.0
    view = HistoryView("time", MS, log_axis=True)

    chart = charts.history(frame, change_frame(), view)

    scale = layers_of(spec_of(chart), "point")[0]["encoding"]["y"]["scale"]
    assert scale["type"] == "log"
    assert scale["domain"][0] > 0
    assert "NaN" not in svg_of(chart)


def test_a_log_axis_is_not_drawn_through_zero():
    view = HistoryView("objects", DisplayUnit(1.0, ""), log_axis=True)

    spec = spec_of(charts.history(history_frame([0.0, 1.0, 2.0]), change_frame(), view))

    assert layers_of(spec, "point")[0]["encoding"]["y"]["scale"].get("type") != "log"


@pytest.mark.parametrize(("floor", "is_drawn"), [(0.8e-3, True), (0.01e-3, False), (None, False)])
def test_a_floor_is_drawn_where_it_does_not_crush_the_points(floor, is_drawn):
    view = HistoryView("time", MS, floor=floor)

    chart = charts.history(history_frame([1e-3] * 3), change_frame(), view)

    assert ("floor 0.8 ms" in svg_of(chart)) is is_drawn


def test_a_distant_floor_is_drawn_on_a_log_axis():
    view = HistoryView("time", MS, floor=0.01e-3, log_axis=True)

    assert "floor 0.01 ms" in svg_of(
        charts.history(history_frame([1e-3] * 3), change_frame(), view)
    )


def test_charts_leave_their_frames_as_they_were():
    frame, changes = history_frame([1e-3] * 4), change_frame((2, 1e-3, 2e-3))
    before = frame.copy(), changes.copy()

    charts.history(frame, changes, VIEW)
    charts.overlay(frame.assign(series="a"), changes.assign(series="a"), VIEW)

    pd.testing.assert_frame_equal(frame, before[0])
    pd.testing.assert_frame_equal(changes, before[1])


def test_a_sparkline_has_no_axis_in_any_layer():
    """Vega in a browser cannot merge the axis of one layer with the lack of one in another."""
    frame, changes = history_frame([1e-3] * 8), change_frame((4, 1e-3, 2e-3))

    layers = spec_of(charts.sparkline(frame, changes, VIEW))["layer"]

    places = [layer["encoding"].get(name) for layer in layers for name in ("x", "y")]
    assert [place["axis"] for place in places if place] == [None] * 5


def test_an_empty_history_is_an_empty_chart():
    empty = history_frame([])

    assert svg_of(charts.history(empty, change_frame(), VIEW)).startswith("<svg")
    assert svg_of(charts.sparkline(empty, change_frame(), VIEW)).startswith("<svg")


def test_overlaid_series_keep_their_names_and_their_own_levels():
    points = pd.concat(
        [
            history_frame([1e-3] * 6, series="page_size=1"),
            history_frame([2e-3] * 6, series="page_size=16"),
        ]
    )
    changes = change_frame((3, 1e-3, 1.5e-3)).assign(series="page_size=1")

    chart = charts.overlay(points, changes, VIEW)

    svg = svg_of(chart)
    assert "page_size=1" in svg
    assert "page_size=16" in svg
    spec = spec_of(chart)
    (levels,) = [
        rows_of(spec, layer)
        for layer in layers_of(spec, "rule")
        if layer["encoding"].get("y", {}).get("field") == "level"
    ]
    assert {row["series"] for row in levels} == {"page_size=1"}
    assert [row["level"] for row in levels] == pytest.approx([1.0, 1.5])


def test_only_what_is_hovered_travels_to_the_browser():
    spec = spec_of(charts.history(history_frame([1e-3] * 3), change_frame(), VIEW))

    row = rows_of(spec, layers_of(spec, "point")[0])[0]
    hovered = {tip["field"] for tip in layers_of(spec, "point")[0]["encoding"]["tooltip"]}

    assert {"short", "subject", "run_id", "n", "environment"} <= hovered <= set(row)
    assert "commit" not in row


def test_the_ticks_name_commits_and_days():
    svg = svg_of(charts.history(history_frame([1e-3] * 30), change_frame(), VIEW))

    assert commit_text(sha(29)) in svg
    assert "2026-01-30" in svg
