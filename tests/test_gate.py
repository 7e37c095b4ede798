"""The gate: what stops a change, by suites, and what somebody answers for."""

import datetime as dt
import json

import pytest

from dashboard.cli_exit import ExitCode
from db.cases import Verdict
from db.gate import FAIL_ON, Acknowledged, GateError, Policies, SuitePolicy, gate, read_policies
from tests.command_on_tree import BASE, BROKEN, SLOWER, command_on, small_tree
from tests.compared import case, comparison

TODAY = dt.date(2026, 12, 1)
REGRESSION = FAIL_ON["regression"]
ANSWERED = Acknowledged(
    "step.*", TODAY, "me@example.org", "exact masks", params="context=1024*", up_to_rel=0.2
)


def stopped(*cases, fail_on=REGRESSION, policies=None, today=TODAY):
    found = gate(comparison(*cases), fail_on, policies or Policies(), today)
    assert found.passes == (not found.stopped)
    return [one.case for one in found.stopped]


def test_regression_stops_and_good_or_quiet_cases_do_not():
    slow = case(Verdict.REGRESSION)
    rest = [case(one) for one in (Verdict.IMPROVEMENT, Verdict.NO_CHANGE, Verdict.INCONCLUSIVE)]

    assert stopped(slow, *rest) == [slow]
    assert stopped(*rest) == []
    assert stopped(*rest, fail_on=FAIL_ON["inconclusive"]) == [rest[2]]


def test_only_what_fresh_pairs_confirmed_is_in_the_way_where_that_is_asked_for():
    flagged, sure = case(Verdict.REGRESSION), case(Verdict.REGRESSION, confirmed=True)
    gone = case(Verdict.REMOVED, head_value=None, relative_change=None)

    found = gate(
        comparison(flagged, sure, gone), REGRESSION, Policies(), TODAY, confirmed_only=True
    )

    assert [one.case for one in found.stopped] == [sure, gone]
    assert [one.case for one in found.informational] == [flagged]
    assert found.informational[0].reason.endswith(", not confirmed")


@pytest.mark.parametrize("verdict", [Verdict.FAILED, Verdict.REMOVED, Verdict.SKIPPED])
@pytest.mark.parametrize("fail_on", [frozenset(), REGRESSION])
def test_deleting_skipping_or_breaking_a_measured_case_is_no_way_past(verdict, fail_on):
    gone = case(verdict, head_value=None, relative_change=None)
    never = case(verdict, base_value=None, head_value=None, relative_change=None)

    assert stopped(gone, never, fail_on=fail_on) == [gone]


def test_threshold_of_the_first_suite_that_fits_counts():
    policies = Policies((SuitePolicy("moe.*", threshold_rel=0.5), SuitePolicy(threshold_rel=0.12)))
    small = case(Verdict.REGRESSION, relative_change=0.119)
    large = case(Verdict.REGRESSION, relative_change=0.12)
    fewer = case(Verdict.REGRESSION, relative_change=-0.3)
    moe = case(Verdict.REGRESSION, benchmark="moe.Moe.time", relative_change=0.4)

    assert stopped(small, large, fewer, moe, policies=policies) == [large, fewer]


def test_metric_chooses_a_suite_too():
    policies = Policies((SuitePolicy(metric="peak_memory", required=False),))

    assert stopped(case(Verdict.REGRESSION), policies=policies)


def test_what_is_not_required_is_told_and_not_in_the_way():
    policies = Policies((SuitePolicy(required=False),))
    found = gate(comparison(case(Verdict.REGRESSION)), REGRESSION, policies, TODAY)

    assert found.passes
    assert len(found.informational) == 1


def test_acknowledged_regression_passes_until_its_day_and_up_to_its_size():
    policies = Policies(acknowledged=(ANSWERED,))
    within = case(Verdict.REGRESSION, relative_change=0.2)
    larger = case(Verdict.REGRESSION, relative_change=0.21)
    elsewhere = case(Verdict.REGRESSION, params="context=4096")

    assert stopped(within, larger, elsewhere, policies=policies) == [larger, elsewhere]
    assert stopped(within, policies=policies, today=TODAY + dt.timedelta(days=1)) == [within]


def test_acknowledging_a_size_lets_no_case_go_and_a_failure_is_never_expected():
    gone = case(Verdict.REMOVED, relative_change=None)
    failed = case(Verdict.FAILED, relative_change=None)
    may_go = Policies(acknowledged=(Acknowledged("*", TODAY, "me", "moved", is_gone=True),))

    assert stopped(gone, policies=Policies(acknowledged=(ANSWERED,))) == [gone]
    assert stopped(gone, failed, case(Verdict.REGRESSION), policies=may_go) == [
        failed,
        case(Verdict.REGRESSION),
    ]


def test_file_of_policies_is_read(tmp_path):
    path = tmp_path / "gate.toml"
    path.write_text(
        '[[suites]]\nbenchmark = "step.*"\nthreshold_rel = 1\n'
        '[[acknowledged]]\nbenchmark = "step.*"\nparams = "context=1024*"\nup_to_rel = 0.2\n'
        'until = 2026-12-01\nby = "me@example.org"\nreason = "exact masks"\n'
    )

    assert read_policies(path) == Policies((SuitePolicy("step.*", threshold_rel=1),), (ANSWERED,))


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[suite]]", "'suite'"),
        ("suites = 3", "expected"),
        ("[[suites]]\nrequire = false", "'require'"),
        ("[[suites]]\nrequired = 0", "expected bool"),
        ("[[suites]]\nthreshold_rel = -1", "from 0 on"),
        ("[[suites]]\nthreshold_rel = nan", "from 0 on"),
        ('[[acknowledged]]\nbenchmark = "*"\nby = "x"\nreason = "y"', "until: expected one"),
        ('[[acknowledged]]\nuntil = "2026-12-01"', "expected date"),
        ("[[suites", "expected TOML"),
    ],
)
def test_typo_in_a_policy_is_refused(tmp_path, text, said):
    path = tmp_path / "gate.toml"
    path.write_text(text)

    with pytest.raises(GateError, match=said):
        read_policies(path)


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gate")
    call = command_on(f"sqlite:///{folder / 'bench.db'}")
    assert call("ingest", str(small_tree(folder / "results").root)).exit_code == ExitCode.OK
    return call


def test_command_ends_as_the_gate_says(filled, tmp_path):
    path = tmp_path / "gate.toml"
    path.write_text("[[suites]]\nthreshold_rel = 0.25\n")
    gated = ("--fail-on", "regression")

    slower = filled("compare", BASE, SLOWER, *gated, "--json")
    broken = filled("compare", BASE, BROKEN, *gated)
    allowed = filled("compare", BASE, SLOWER, *gated, "--policy", str(path))
    alone = filled("compare", BASE, SLOWER, "--policy", str(path))

    assert slower.exit_code == ExitCode.REGRESSION, slower.output
    told = json.loads(slower.stdout)["gate"]
    assert [one["case"] for one in told["stopped"]] == ["step.Step.time_step(context=2048)"]
    assert not told["passes"]
    assert "gate: stopped by 1 case" in slower.stderr
    assert broken.exit_code == ExitCode.FAILED
    assert (allowed.exit_code, alone.exit_code) == (ExitCode.OK, ExitCode.BAD_INPUT)
