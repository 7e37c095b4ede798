"""The page of two commits: its table and charts are the comparison's rows, and links are obeyed."""

import json
import re
from dataclasses import replace

import pandas as pd
import pytest
import vl_convert

from dashboard import compare_charts, compare_frames
from dashboard.downloads import csv_of, file_stem
from dashboard.drawing import drawing_of
from db.compare import CaseKey, CaseResult, Verdict, compare
from tests import pages_database as demo
from tests.test_pages import charts, opened, unfolded, words


def result(context, page, regime, value, *, name="step.Step.time_step"):
    params = f"context={context}, page_size={page}, regime={regime}"
    return CaseResult(
        key=CaseKey(name, "1", params, "time", "h200-1", "python 3.11"),
        unit="seconds",
        direction="lower",
        status="ok",
        value=value,
        samples=tuple(value * (1 + 0.001 * step) for step in range(6)),
        n=6,
        noise_rel=0.004,
    )


@pytest.fixture(scope="module")
def cases():
    before = [
        result(context, page, regime, 0.01)
        for context in (1024, 65536)
        for page in (1, 16)
        for regime in ("low", "high")
    ]
    after = [
        replace(one, value=0.02, samples=tuple(2 * value for value in one.samples))
        if "context=65536, page_size=1," in one.key.params
        else one
        for one in before
    ]
    return compare(before, after).cases


def test_the_table_has_every_case_with_its_numbers(cases):
    table = compare_frames.table_of(cases)

    assert len(table) == len(cases) == 8
    assert table["verdict"].iloc[0] == "▲ regression"
    for place, case in enumerate(cases):
        assert table["change_pct"].iloc[place] == 100 * case.relative_change
        assert table["low_pct"].iloc[place] == 100 * case.interval_low
        assert table["params"].iloc[place] == case.key.params


def test_the_gravest_of_each_verdict_are_told_first_as_text():
    before = [result(2**place, 1, "low", 0.01, name="a|b`c") for place in range(20)]
    after = [
        replace(one, value=factor * 0.01, samples=tuple(factor * value for value in one.samples))
        for one, factor in zip(before[:12], [2.0] * 8 + [0.5] * 4, strict=True)
    ]
    cases = compare(before, after).cases

    found = compare_frames.gravest(cases)

    assert [case.verdict.value for case in found] == ["regression"] * 6 + ["improvement"] * 4
    line = compare_frames.lines(found).replace("\N{NO-BREAK SPACE}", " ").splitlines()[2]
    assert line.startswith(r"| ▲ \+100.0 % | a\|b\`c\(context=")
    assert line.endswith("| regression |")
    assert "| 10 ms | 20 ms |" in line
    removed = compare_frames.names_line(cases, Verdict.REMOVED)
    assert " 8 removed**: " in removed
    assert removed.endswith(" and 4 more")
    assert compare_frames.names_line(cases, Verdict.FAILED) is None


def test_a_map_for_each_regime_holds_each_case_once(cases):
    maps = compare_frames.heat_maps(cases)

    assert [(one.across, one.down) for one in maps] == [("context", "page_size")] * 2
    assert ["regime=high" in one.title or "regime=low" in one.title for one in maps] == [True, True]
    for one in maps:
        slow = one.cells[one.cells["verdict"] == "regression"]
        assert slow["across"].tolist() + slow["down"].tolist() == ["65536", "1"]
        assert slow["change_pct"].tolist() == pytest.approx([100.0])
        assert slow["worse_pct"].iloc[0] > 0
        assert len(one.cells) == 4


def test_contexts_stand_in_the_order_of_their_size(cases):
    (one, _) = compare_frames.heat_maps(cases)

    places = one.cells.set_index("across")["order_across"]
    assert places["1024"].unique() == [0]
    assert places["65536"].unique() == [1]


def test_what_marks_a_relevant_change_crosses_no_name(cases):
    frame = compare_frames.intervals(cases).assign(case=lambda rows: "a long name " + rows["case"])

    drawn = vl_convert.vegalite_to_svg(
        drawing_of(compare_charts.intervals(frame, relevance_pct=3.0)).for_file()
    )

    names = re.findall(r'<text [^>]*,([\d.]+)\)"[^>]*>a long name', drawn)
    rules = re.findall(r'<line [^>]*,([\d.]+)\)" x2="0" y2="([\d.]+)"[^>]*dasharray', drawn)
    assert len(rules) == 2 * len(names) == 2 * len(frame)
    for top, height in rules:
        bottom = float(top) + float(height)
        assert not [name for name in names if float(top) <= float(name) <= bottom]


def test_both_charts_can_be_written_into_files(cases):
    frame = compare_frames.intervals(cases)
    (first, _) = compare_frames.heat_maps(cases)

    for chart in (
        compare_charts.intervals(frame, relevance_pct=3.0),
        compare_charts.heat_map(first),
    ):
        chart.to_dict()  # what Vega-Lite's schema says of it
        drawn = vl_convert.vegalite_to_svg(drawing_of(chart).for_file())
        assert "<svg" in drawn
        assert "aria-roledescription" in drawn


def test_every_verdict_has_its_own_sign():
    assert set(compare_frames.SIGNS) == set(Verdict)
    assert len(set(compare_frames.SIGNS.values())) == len(Verdict)


def test_no_text_of_a_download_is_a_formula():
    table = pd.DataFrame({"subject": ["=HYPERLINK(1)", "plain", None], "value": [-1.5, 2.0, 3.0]})

    lines = csv_of(table).decode().splitlines()

    assert lines[1:] == ["'=HYPERLINK(1),-1.5", "plain,2.0", ",3.0"]


def test_a_file_has_a_name_of_safe_characters():
    assert file_stem("../x <script> 😀") == "x-script"
    assert file_stem("💥") == "chart"
    assert len(file_stem("a" * 10_000)) == 120


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    address = f"sqlite:///{tmp_path_factory.mktemp('compare')}/demo.db"
    demo.build(address)
    return address


def test_a_link_compares_its_commits_and_filters_its_cases(url, monkeypatch):
    monkeypatch.setenv("DDTREE_BENCH_DB", url)
    head = demo.sha(demo.STEP_AT)

    app = opened("compare", url, head=head, verdict="improvement", machine="nowhere")

    assert not app.exception
    assert "there is no machine “nowhere” here" in app.warning[0].value
    assert "there is no verdict “improvement” here" in app.warning[1].value
    # Without a baseline it is the commit before.
    before = app.selectbox(key="compare.filter.base").value
    assert before == demo.sha(demo.STEP_AT - 1)
    assert app.error[0].value.startswith("**Regressed: 2 regressions")
    first = next(text.value for text in app.markdown if text.value.startswith("| Change"))
    assert [line[:3] for line in first.splitlines()[2:]] == ["| ▲", "| ▲"]
    assert not app.dataframe  # its code is loaded once the cases are opened
    app = unfolded(app, "compare.cases")
    (table,) = [table.value for table in app.dataframe]
    assert table["verdict"].tolist()[:2] == ["▲ regression", "▲ regression"]
    assert table["change_pct"].iloc[0] == pytest.approx(9.0, abs=2.0)
    assert "What moved together" in words(app)
    (intervals, heat) = charts(app)
    assert "rule" in json.dumps(intervals)
    assert "rect" in json.dumps(heat)


def test_a_link_that_narrows_the_cases_shows_their_table(url):
    app = opened("compare", url, head=demo.sha(demo.STEP_AT), verdict="regression")

    (table,) = [table.value for table in app.dataframe]
    assert set(table["verdict"]) == {"▲ regression"}
    assert len(charts(app)) == 2


def test_a_link_that_says_a_default_keeps_its_address(url):
    """An address that is written anew is one that the back button cannot leave."""
    head = demo.sha(demo.STEP_AT)
    first = opened("compare", url, head=head)
    (machine,) = (one.value for one in first.selectbox if one.label == "Machine")

    app = opened("compare", url, machine=machine, head=head)

    assert dict(app.query_params) == {"machine": machine, "head": head}


def test_one_commit_has_nothing_to_be_compared_with(url):
    app = opened("compare", url, machine=demo.INCIDENT)

    assert not app.exception
    assert "Only one commit has results" in words(app)


def test_an_unknown_merge_base_is_told(url):
    app = opened("compare", url, machine=demo.HISTORY_MACHINE, base="merge-base")

    assert not app.exception
    assert r"merge base\: expected one of" in "\n".join(one.value for one in app.warning)
