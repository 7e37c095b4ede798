"""The page of a run: what its charts draw is what the diagnosis says, and nothing beside it."""

# ruff: noqa: RUF001 - factors are asserted as they are printed

import re
from collections import Counter
from pathlib import Path

import pytest
from streamlit.dataframe_util import convert_arrow_bytes_to_pandas_df as frame_of

from dashboard import diagnose_charts, diagnose_frames
from dashboard.data import opened as opened_database
from dashboard.words import escaped
from db.diagnose import Ceilings, Evidence, EvidencePoint, diagnose
from db.ingest import ingest
from db.session import open_database
from tests import ladders
from tests.test_pages import charts, opened, unfolded, words

ROOT = Path(__file__).parent.parent
TREES = ("original-incident", "h200", "h200-attention")
READ, MATMUL = 4.0e12, 8.0e14


def point(context, time_s, *, flops=None):
    return EvidencePoint(
        benchmark="attention.Verify.time_verify",
        params=f"context={context}, page_size=16",
        context_tokens=context,
        time_s=time_s,
        n=20,
        bytes=context * 1152,
        kv_bytes=context * 1152,
        flops=flops,
    )


@pytest.fixture(scope="module")
def straight():
    """Times on a line: 10 us and then 2 TB/s, half of what the machine reads."""
    contexts = (1024, 32768, 65536, 131072, 189440)
    points = tuple(
        point(one, 10e-6 + one * 1152 / 2e12, flops=one * 1152 * 8 if one > 1024 else None)
        for one in contexts
    )
    return Evidence("a run", "NVIDIA H200", Ceilings(READ, MATMUL, "bf16"), "measured", points)


@pytest.fixture(scope="module")
def rungs():
    times = dict.fromkeys(ladders.VARIANTS, 100.0) | ladders.MEASURED_US[65536]
    points = tuple(ladders.ladder(times))
    return diagnose(Evidence("a ladder", None, Ceilings(), None, points)).ladder


def test_a_roofline_holds_the_cases_whose_work_is_known(straight):
    cases = diagnose_frames.roofline_cases(straight, diagnose(straight))
    roof = diagnose_frames.roof(straight, cases)

    assert len(cases) == 4
    assert cases["intensity"].tolist() == pytest.approx([8.0] * 4)
    fastest = straight.points[-1]
    assert cases["tflops"].max() == pytest.approx(fastest.flops / fastest.time_s / 1e12)
    # The ridge is where both rates meet, and no case is above the roof.
    assert roof["intensity"].iloc[1] == pytest.approx(MATMUL / READ)
    assert roof["tflops"].iloc[-1] == pytest.approx(MATMUL / 1e12)
    assert (cases["tflops"] <= cases["intensity"] * READ / 1e12).all()
    diagnose_charts.roofline(cases, roof).to_dict()


def test_the_line_over_context_is_the_fit(straight):
    diagnosis = diagnose(straight)
    (fit,) = diagnosis.fits
    cases = diagnose_frames.fitted_cases(straight, fit)
    line = diagnose_frames.line_of(fit, cases)

    assert cases["context_tokens"].tolist() == [one.context_tokens for one in straight.points]
    assert line["line_ms"].iloc[0] == fit.t0_ms == pytest.approx(0.010, rel=0.02)
    assert cases["line_ms"].tolist() == pytest.approx(cases["time_ms"].tolist(), rel=0.01)
    assert (
        diagnose_frames.fits_table(diagnosis.fits)["bandwidth_gb_s"].iloc[0] == fit.bandwidth_gb_s
    )
    diagnose_charts.line_over_bytes(cases, line).to_dict()


def test_distances_are_those_of_the_diagnosis_the_farthest_first(straight):
    diagnosis = diagnose(straight)
    frame = diagnose_frames.distances(diagnosis, 3)

    known = sorted((case.floor_ratio for case in diagnosis.cases), reverse=True)
    assert frame["floor_ratio"].tolist() == known[:3]
    diagnose_charts.distances(frame).to_dict()


def test_a_waterfall_goes_down_the_ladder_step_by_step(rungs):
    steps = diagnose_frames.waterfall(rungs)

    assert steps["before_ms"].iloc[1:].tolist() == steps["after_ms"].iloc[:-1].tolist()
    assert steps["factor"].iloc[0] == "read_once"
    assert steps["text"].iloc[0] == "2.5×"
    diagnose_charts.waterfall(steps).to_dict()


def test_every_factor_has_its_three_readings(rungs):
    table = diagnose_frames.three_readings(rungs)

    assert set(table["place"]) == {one.value for one in diagnose_frames.PLACES}
    for one in rungs:
        row = table[(table["factor"] == one.factor) & (table["place"] == one.place.value)].iloc[0]
        assert row["worth"] == one.ratio.value
        assert row["outcome"] == one.ratio.outcome.value
    diagnose_charts.three_readings(table).to_dict()


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    url = f"sqlite:///{tmp_path_factory.mktemp('diagnose')}/recorded.db"
    engine = open_database(url, must_exist=False)
    trees = [ROOT / "benchmarks" / "recorded" / name for name in TREES]
    ingest(engine, trees)
    engine.dispose()
    return url


def test_a_run_is_drawn_with_its_claims(recorded, monkeypatch):
    monkeypatch.setenv("DDTREE_BENCH_DB", recorded)
    app = opened("diagnose", recorded, machine="h200", sweep="nothing")

    assert not app.exception
    assert "there is no sweep “nothing” here" in app.warning[0].value
    headers = [one.value for one in app.header]
    assert headers[:2] == ["Roofline", "Distance from the floor"]
    assert len(charts(app)) == 3
    (claims,) = unfolded(app, "diagnose.claims").dataframe
    assert "supported" in claims.value["status"].tolist()


def test_what_roofline_and_line_draw_stands_in_tables_beside_them(recorded, monkeypatch):
    monkeypatch.setenv("DDTREE_BENCH_DB", recorded)
    app = opened("diagnose", recorded, machine="h200")
    sweep = app.selectbox(key="diagnose.filter.sweep").value
    before = len(app.dataframe)

    unfolded(app, "diagnose.roofline")
    unfolded(app, f"diagnose.points.{sweep}")

    shown = [table.value for table in app.dataframe]
    assert len(shown) == before + 2
    roofline, points = (
        next(table for table in shown if column in table) for column in ("intensity", "gigabytes")
    )
    drawn = drawn_rows(app)
    assert roofline["tflops"].tolist() == drawn[0]["tflops"].tolist()
    assert points["time_ms"].tolist() == drawn[2]["time_ms"].tolist()
    assert points["n"].tolist() == drawn[2]["n"].tolist()


def drawn_rows(app):
    """Give the rows of each chart."""
    return [
        frame_of(one.data.data)
        for chart in app.get("vega_lite_chart")
        for one in chart.proto.datasets
        if one.name == "results"
    ]


def test_an_alarm_names_its_case_first(recorded):
    app = opened("diagnose", recorded, machine="h200")

    with opened_database(recorded) as source:
        commit = app.selectbox(key="diagnose.filter.commit").value
        alarm = source.diagnoses("h200", commit)[0][1].alarms[0]
    assert app.error[0].value == f"**{escaped(alarm.case)}**: {escaped(alarm.statement)}"


def test_what_is_claimed_of_one_other_case_is_not_told_as_of_several(recorded):
    with opened_database(recorded) as source:
        commit = next(
            commit
            for commit in source.machine_commits("h200")["commit"]
            for _, diagnosis in source.diagnoses("h200", commit)[:1]
            if 2 in Counter(one.name for one in diagnosis.claims).values()
        )
    app = opened("diagnose", recorded, machine="h200", commit=commit)

    others = [one.value for one in app.caption if "is claimed of" in one.value]
    assert any("1 other case as well, with numbers of its own." in one for one in others)
    assert not any("1 other case " in one and "each" in one for one in others)


def test_no_claim_counts_one_thing_as_many(recorded):
    text = words(opened("incident", recorded))

    assert "**1** page size measured" in text
    assert not re.search(r"\*\*1\*\* (page sizes|contexts|doubts)", text)


def test_a_run_of_a_ladder_draws_its_waterfall_and_its_readings(recorded):
    with opened_database(recorded) as source:
        (commit,) = {
            commit
            for commit in source.machine_commits("h200")["commit"]
            for _, diagnosis in source.diagnoses("h200", commit)
            if diagnosis.ladder
        }

    app = opened("diagnose", recorded, machine="h200", commit=commit)

    assert not app.exception
    assert "The ladder: one factor at a time" in words(app)
    drawn = [chart["layer"][-1]["encoding"] for chart in charts(app)]
    assert any(one["x"].get("field") == "factor" for one in drawn)
    assert any(one["y"]["field"] == "factor" for one in drawn)


def test_the_incident_stands_beside_its_reproduction(recorded):
    app = opened("incident", recorded)

    assert not app.exception
    text = words(app)
    assert "The incident beside its reproduction" in text
    assert "Of the original, supported" in text
    tables = [table.value for table in app.table]
    assert tables[0].loc["time"].tolist()[0] == "327 ms"
    assert "page size 1" in text
    # Each status says whose it is, wherever a narrow window lays it.
    sides = re.findall(r"-badge\[(original|repeated)\\?: (\w+)", text)
    assert len(sides) > 10
    assert [side for side, _ in sides] == ["original", "repeated"] * (len(sides) // 2)


@pytest.mark.parametrize("name", ["diagnose", "incident"])
def test_every_table_of_rows_is_shown_once_it_is_opened(recorded, monkeypatch, name):
    monkeypatch.setenv("DDTREE_BENCH_DB", recorded)
    app = opened(name, recorded)
    assert not app.dataframe  # its code would keep a browser from drawing the charts
    folds = [fold.key for fold in app.expander]
    assert len(folds) > 3

    for count, key in enumerate(folds, start=1):
        unfolded(app, key)

        assert not app.exception
        assert len(app.dataframe) == count
    assert all(len(table.value) for table in app.dataframe)
