"""Comparisons whose comments are kept as files, one for each verdict that a reader may meet.

`python -m tests.comment_goldens` writes the files anew; read what changed before you commit it.
"""

import datetime as dt
from pathlib import Path

from dashboard.pr_comment import CommentContext, render
from db.change_queries import ExplainedCases
from db.compare import Verdict
from db.evidence import Claim, Status
from db.gate import FAIL_ON, Acknowledged, Policies, SuitePolicy, gate
from db.moved_cases import findings
from tests.compared import UNMEASURED, case, comparison

FOLDER = Path(__file__).parent / "golden" / "comments"
BASE, HEAD = "b" * 40, "a" * 40
TODAY = dt.date(2026, 12, 1)
CLAIMS = (
    Claim(
        name="change_of_stage",
        statement="verify takes 93% of the change: 5 → 6 ms",
        value=93.0,
        unit="% of the change",
        evidence="step.Step.time_step",
        status=Status.SUPPORTED,
        is_alarm=True,
    ),
    Claim(
        name="change_of_clock",
        statement="the SM clock is as before",
        value=0.0,
        unit="% of the clock",
        evidence="median of 2 cases",
        status=Status.SUPPORTED,
    ),
)
POLICIES = Policies(
    (SuitePolicy("peers.*", required=False),),
    (
        Acknowledged(
            "step.*", dt.date(2027, 1, 31), "ana@example.org", "exact masks", up_to_rel=0.2
        ),
    ),
)
AT = {"n_base": 6, "n_head": 6, "confirmed": True, "reason": "6 fresh pairs in turns"}
SLOWER = case(Verdict.REGRESSION, **AT)
SLOWER_TOO = case(
    Verdict.REGRESSION,
    params="context=4096, page_size=16",
    relative_change=0.15,
    interval_low=0.12,
    interval_high=0.18,
    base_value=2e-2,
    head_value=2.3e-2,
    **AT,
)
FASTER = case(
    Verdict.IMPROVEMENT,
    benchmark="tree.Build.time_build",
    params="budget=64",
    base_value=2e-4,
    head_value=1.6e-4,
    relative_change=-0.2,
    interval_low=-0.24,
    interval_high=-0.16,
    **AT,
)
STEADY = case(
    Verdict.NO_CHANGE,
    benchmark="attention.TreeAttention.time_attention",
    head_value=8.016e-3,
    relative_change=0.002,
    interval_low=-0.008,
    interval_high=0.012,
)
OPEN = case(
    Verdict.INCONCLUSIVE,
    benchmark="prefill.Prefill.time_prefill",
    params="",
    head_value=8.32e-3,
    relative_change=0.04,
    interval_low=-0.02,
    interval_high=0.1,
    needed_processes=6,
    noise_rel=None,
)
STAYED_OPEN = case(
    Verdict.INCONCLUSIVE,
    benchmark="generation.Generation.time_generate",
    params="",
    head_value=8.78e-3,
    relative_change=0.097,
    interval_low=-0.19,
    interval_high=0.48,
    **(AT | {"n_base": 24, "n_head": 24}),
)
BROKEN = case(
    Verdict.FAILED,
    benchmark="moe.Moe.time_moe",
    params="",
    reason="no value at head",
    **(UNMEASURED | {"base_value": 3e-3}),
)
GONE = case(
    Verdict.REMOVED,
    benchmark="drafter.Drafter.time_draft",
    params="",
    reason="only at base",
    **(UNMEASURED | {"base_value": 3e-3}),
)
NEW = case(
    Verdict.NEW, benchmark="ladder.Ladder.time_rung", params="", reason="only at head", **UNMEASURED
)
DROPPED = case(
    Verdict.SKIPPED,
    benchmark="prefill.Prefill.time_prefill",
    reason="skipped at head",
    **(UNMEASURED | {"base_value": 3e-3}),
)
THIN = case(
    Verdict.NOT_ENOUGH_HISTORY,
    reason="1 sample at base",
    n_base=1,
    interval_low=None,
    interval_high=None,
    noise_rel=None,
)
REFUTED = case(
    Verdict.NO_CHANGE,
    relative_change=0.004,
    interval_low=-0.011,
    interval_high=0.019,
    **AT,
)
SKIPPED = case(
    Verdict.SKIPPED,
    benchmark="peers.Peers.time_peer",
    params="",
    reason="skipped on both sides",
    **UNMEASURED,
)
RATE = case(
    Verdict.IMPROVEMENT,
    benchmark="step.Step.track_rate",
    unit="tokens/s",
    direction="higher",
    base_value=100.0,
    head_value=131.25,
    relative_change=0.3125,
    interval_low=0.25,
    interval_high=2.5,
    confirmed=True,
)


def moved(one):
    """The same case on a runner that changed."""
    return case(
        one.verdict,
        benchmark=one.key.benchmark,
        params=one.key.params,
        environment_differs=True,
        confirmed=False,
        base_value=one.base_value,
        head_value=one.head_value,
        relative_change=one.relative_change,
        interval_low=one.interval_low,
        interval_high=one.interval_high,
    )


GOLDENS = {  # cases, what else the context says
    "regressed": ([SLOWER_TOO, SLOWER, STEADY], {}),
    "suspected": ([case(Verdict.REGRESSION), STEADY], {}),
    "improved": ([FASTER, RATE, STEADY], {}),
    "no_change": ([STEADY, SKIPPED], {}),
    "refuted": ([REFUTED, STEADY], {}),
    "removed": ([GONE, DROPPED, STEADY], {}),
    "not_enough_history": ([THIN], {}),
    "inconclusive": ([OPEN, STAYED_OPEN, STEADY], {}),
    "failed": ([BROKEN, GONE, STEADY], {}),
    "mixed": ([SLOWER_TOO, SLOWER, BROKEN, OPEN, FASTER, STEADY, NEW], {}),
    "acknowledged": ([SLOWER, STEADY], {"policies": POLICIES}),
    "informational": (
        [case(Verdict.REGRESSION, benchmark="peers.Peers.time_peer", **AT)],
        {"policies": POLICIES},
    ),
    "mismatch": ([moved(SLOWER_TOO), moved(SLOWER), moved(STEADY)], {}),
    "stale": ([SLOWER], {"newest": "c" * 40}),
    "new": ([NEW], {}),
}


def text_of(name, **more):
    """The comment of a golden."""
    cases, options = GOLDENS[name]
    found = comparison(*cases)
    judged = gate(
        found,
        FAIL_ON["confirmed"],
        options.get("policies", Policies()),
        TODAY,
        confirmed_only=True,
    )
    context = CommentContext(
        BASE, HEAD, newest=options.get("newest"), gate=judged, dashboard="https://bench.example.org"
    )
    explained = [
        ExplainedCases(one, CLAIMS if one.verdict == Verdict.REGRESSION else ())
        for one in findings(found)
    ]
    return render(found, context, explained, **more)


if __name__ == "__main__":
    FOLDER.mkdir(parents=True, exist_ok=True)
    for golden in GOLDENS:
        (FOLDER / f"{golden}.md").write_text(f"{text_of(golden)}\n", encoding="utf-8")
