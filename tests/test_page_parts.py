"""What pages are made of: series told apart, findings in order, commands that measure again."""

import datetime as dt
import re
import shlex
from itertools import combinations

import numpy as np
import pandas as pd
import pytest
from asv.benchmarks import Benchmarks
from asv.config import Config
from hypothesis import given, settings
from hypothesis import strategies as st

from dashboard.chart_frames import align
from dashboard.downloads import file_stem
from dashboard.findings import group_findings, standing, verdict_line
from dashboard.reproduce import recipe
from dashboard.selection import (
    choices,
    distinct_names,
    link_query,
    narrow,
    param_columns,
    parse_params,
    twin_columns,
    with_param_columns,
)
from dashboard.theme import CHANGE_COLOURS, SERIES_COLOURS, STATUS_STYLES
from dashboard.words import LONGEST, escaped, unbroken, unit_text
from db.labels import canonical_params
from db.queries import Finding

DAY = dt.datetime(2026, 3, 1, tzinfo=dt.UTC)


def series_frame(*rows: dict[str, object]) -> pd.DataFrame:
    defaults = {
        "benchmark": "step.Step.time_step",
        "version": "1",
        "params": "context=1024, page_size=1",
        "metric": "time",
        "machine": "h200-1",
        "variant": "python 3.11",
    }
    return pd.DataFrame([{"series_id": i, **defaults, **row} for i, row in enumerate(rows)])


def finding(series_id: int, change: float, *, day: int = 1, **more: object) -> Finding:
    values = {
        "series_id": series_id,
        "benchmark": f"step.Step.time_{series_id}",
        "params": "",
        "machine": "h200-1",
        "commit": f"{day:040d}",
        "commit_date": DAY + dt.timedelta(days=day),
        "subject": None,
        "before": 1.0,
        "after": 1.0 + change,
        "unit": "seconds",
        "relative_change": change,
        "is_regression": change > 0,
        "cause": "code",
        "alert_state": None,
    }
    return Finding(**{**dict.fromkeys(Finding.__dataclass_fields__), **values, **more})


names = st.from_regex(r"[a-z_]{1,8}", fullmatch=True)
values = st.from_regex(r"[A-Za-z0-9_.'(),+ -]{0,10}", fullmatch=True).filter(
    lambda value: not re.search(r", \w+=", value)
)


@settings(deadline=None)  # a busy machine is no mistake
@given(st.dictionaries(names, values, max_size=4))
def test_parameters_are_read_as_they_were_written(params):
    written = canonical_params(list(params), list(params.values()))

    assert parse_params(written) == params


def test_a_parameter_that_some_series_lack_is_missing_there():
    table = with_param_columns(series_frame({}, {"params": ""}, {"params": "context=65536"}))

    assert param_columns(table) == ["p.context", "p.page_size"]
    assert choices(table, "p.context") == ["1024", "65536"]
    assert len(narrow(table, "p.page_size", ["1"])) == 1
    assert len(narrow(table, "p.page_size", [])) == 3


def test_choices_are_sorted_as_numbers_where_they_are_numbers():
    contexts = ({"params": f"context={size}"} for size in (185000, 1024, 65536))

    assert choices(with_param_columns(series_frame(*contexts)), "p.context") == [
        "1024",
        "65536",
        "185000",
    ]


def test_series_are_named_by_what_they_do_not_share():
    two = series_frame({}, {"params": "context=1024, page_size=16"})
    other_machine = series_frame({}, {"machine": "ci-cpu"})

    assert distinct_names(two) == ["context=1024, page_size=1", "context=1024, page_size=16"]
    assert distinct_names(other_machine) == ["h200-1", "ci-cpu"]
    assert distinct_names(series_frame({})) == ["step.Step.time_step"]


def test_versions_are_told_only_between_twins():
    benchmarks = series_frame(
        {"version": "a" * 64}, {"benchmark": "tree.Build", "version": "b" * 64}
    )
    twins = series_frame({"version": "a" * 64}, {"version": "b" * 64})

    assert twin_columns(benchmarks) == []
    assert distinct_names(benchmarks) == ["step.Step.time_step", "tree.Build"]
    assert twin_columns(twins) == ["version"]
    assert distinct_names(twins) == ["version aaaaaaaa", "version bbbbbbbb"]


def test_a_link_names_the_case_and_its_machine():
    assert link_query(series_frame({}).to_dict("records")[0]) == {
        "benchmark": "step.Step.time_step",
        "machine": "h200-1",
        "p.context": "1024",
        "p.page_size": "1",
    }


def test_the_worst_regression_comes_first_and_noise_last():
    groups = group_findings(
        [
            finding(1, -0.5, day=1),
            finding(2, 0.05, day=2),
            finding(3, 0.9, day=3, cause="noise"),
            finding(4, 0.2, day=4),
            finding(5, 0.1, day=4),
        ]
    )

    assert [[one.series_id for one in group.findings] for group in groups] == [
        [4, 5],
        [2],
        [1],
        [3],
    ]


def test_only_the_latest_change_of_a_series_stands():
    undone = [finding(1, 0.8, day=1), finding(1, -0.4, day=2), finding(2, 0.1, day=1)]

    assert [one.commit_date.day for one in standing(undone)] == [3, 2]
    line = verdict_line(undone)
    assert line.is_alarming
    assert "1 regression, 1 improvement" in line.text
    assert "+10.0 %" in line.text


@pytest.mark.parametrize(
    "findings", [[], [finding(1, -0.2)], [finding(1, 0.3), finding(1, -0.2, day=2)]]
)
def test_without_a_standing_regression_nobody_is_alarmed(findings):
    assert not verdict_line(findings).is_alarming


@pytest.mark.parametrize(
    ("findings", "beginning"),
    [
        ([finding(1, 0.3)], "**1 regression** stands. Worst: **+30.0 %**"),
        ([finding(1, 0.3), finding(2, 0.2)], "**2 regressions** stand. Worst: **+30.0 %**"),
        ([finding(1, 0.3), finding(2, -0.2)], "**1 regression, 1 improvement** stand. Worst: "),
    ],
)
def test_one_finding_stands_and_several_stand(findings, beginning):
    assert verdict_line(findings).text.startswith(beginning)


def test_a_rate_that_falls_is_a_regression():
    assert verdict_line([finding(1, -0.2, is_regression=True)]).is_alarming


@pytest.mark.parametrize(
    ("benchmark", "params", "selected"),
    [
        ("step.Step.time_step", "context=1024, page_size=1", [0]),
        ("tree.time_build", "", None),
    ],
)
def test_the_pattern_of_a_command_selects_exactly_its_case(benchmark, params, selected):
    how = recipe(
        benchmark=benchmark,
        params=params,
        commit="c" * 40,
        is_external=False,
        has_repository=True,
    )
    sizes = [["1024", "10240"], ["1", "16"]]
    suite = [
        {"name": "step.Step.time_step", "params": sizes},
        {"name": "long_step.Step.time_step", "params": sizes},
        {"name": "tree.time_build", "params": []},
        {"name": "tree.time_build_long", "params": []},
        {"name": "treeXtime_build", "params": []},
    ]

    chosen = Benchmarks(Config(), suite, regex=[shlex.split(how.command)[-1]])

    assert list(chosen) == [benchmark]
    assert selected is None or chosen.benchmark_selection[benchmark] == selected


def test_a_commit_of_another_repository_is_measured_by_asv_itself():
    how = recipe(
        benchmark="suite.time_x",
        params="",
        commit="c" * 40,
        is_external=False,
        has_repository=False,
    )

    assert how.command == rf"asv run --bench '^suite\.time_x$' {'c' * 40}^!"


def test_series_are_aligned_by_position_and_by_date_where_positions_do_not_compare():
    points = pd.DataFrame({"commit": ["a", "b", "c"]})
    commits = pd.DataFrame(
        {
            "commit": ["c", "b", "a"],
            "commit_date": [DAY, DAY + dt.timedelta(1), DAY + dt.timedelta(2)],
            "order_basis": "repository",
            "position": [2, 1, 0],
        }
    )

    by_position = align(points, commits)
    by_date = align(points, commits.assign(order_basis=["date", "repository", "date"]))

    assert by_position["order"].tolist() == [0, 1, 2]
    assert by_date["order"].tolist() == [2, 1, 0]


def test_files_of_long_names_that_begin_alike_stay_apart():
    one, other = (file_stem("context=" + "1" * 200 + end) for end in "ab")

    assert one != other
    assert one[:100] == other[:100]
    assert len(one) == len(other) == 120


def test_text_from_elsewhere_writes_no_markdown():
    assert escaped("a [b](c) *d*\n$e$ :red[f]") == r"a \[b\]\(c\) \*d\* \$e\$ \:red\[f\]"


def test_an_address_in_a_text_from_elsewhere_is_no_link():
    # A page makes a link of an address by itself, of one in two parts it does not.
    told = escaped("see HTTP://a.example/x, https://b.example and www.c.example, not wwww:x")

    assert re.findall(r"(?i)https?\\?://|www\.", told) == []
    assert told.count("\N{WORD JOINER}") == 3


def test_text_from_elsewhere_is_short_and_turns_nothing_around_it():
    assert escaped("y" * 10_000) == "y" * LONGEST + "…"
    turned = escaped("\u202eevil\u2069")
    assert (turned[0], turned[-1]) == ("\u2068", "\u2069")
    assert "\u2069" not in turned[:-1]
    assert escaped("µs → 😀") == "µs → 😀"


@pytest.mark.parametrize(
    ("value", "unit", "told"),
    [
        (1.0, "page sizes measured", "page size measured"),
        (0.0, "page sizes measured", "page sizes measured"),
        (1.0, "contexts on both sides", "context on both sides"),
        (1.0, "doubts", "doubt"),
        (1.0, "times the floor", "times the floor"),
        (None, "doubts", "doubts"),
    ],
)
def test_one_of_a_thing_is_told_as_one(value, unit, told):
    assert unit_text(value, unit) == told


def test_an_instant_in_a_cell_breaks_neither_at_its_spaces_nor_at_its_hyphens():
    told = unbroken("2026-03-01 12:00 UTC")

    assert re.sub("[\\\\\u2060\u00a0]", "", told) == "2026-03-0112:00UTC"
    assert not re.search("-(?!\N{WORD JOINER})| ", told)


# What is left of red, green and blue light to eyes without one kind of cone.
# Source: Machado, Oliveira and Fernandes 2009, severity 1.
VISION = {
    "normal": np.eye(3),
    "protanopia": [
        [0.152286, 1.052583, -0.204868],
        [0.114503, 0.786281, 0.099216],
        [-0.003882, -0.048116, 1.051998],
    ],
    "deuteranopia": [
        [0.367322, 0.860646, -0.227968],
        [0.280085, 0.672501, 0.047413],
        [-0.011820, 0.042940, 0.968881],
    ],
}
# Of linear light with white at 1, divided by the white of daylight.
XYZ = np.array(
    [
        [0.4124564, 0.3575761, 0.1804375],
        [0.2126729, 0.7151522, 0.0721750],
        [0.0193339, 0.1191920, 0.9503041],
    ]
) / np.array([[0.95047], [1.0], [1.08883]])


def seen(colour, vision):
    """Place a colour in CIE L*a*b* as somebody sees it."""
    stored = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    light = np.where(stored <= 0.04045, stored / 12.92, ((stored + 0.055) / 1.055) ** 2.4)
    x, y, z = np.cbrt(XYZ @ np.clip(np.asarray(VISION[vision]) @ light, 0.01, 1))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("vision", VISION)
def test_colours_that_mean_something_stay_apart_for_any_eyes(vision):
    statuses = [style.colour for style in STATUS_STYLES.values()]
    for colours in (statuses, SERIES_COLOURS, CHANGE_COLOURS.values()):
        for one, other in combinations(colours, 2):
            distance = np.linalg.norm(seen(one, vision) - seen(other, vision))
            assert distance > 13, (one, other)  # 2.3 is the least that anybody sees


def test_every_status_has_a_shape_of_its_own():
    assert len({style.shape for style in STATUS_STYLES.values()}) == len(STATUS_STYLES)
