"""Comparisons made by hand, for what shows them or judges them."""

import dataclasses
from collections import Counter

from db.compare import CaseComparison, CaseKey, Comparison, Verdict

KEY = CaseKey("step.Step.time_step", "1", "context=1024, page_size=16", "time", "bw-1", "py3.12")
REGRESSION = CaseComparison(
    key=KEY,
    unit="seconds",
    direction="lower",
    verdict=Verdict.REGRESSION,
    base_value=8e-3,
    head_value=9e-3,
    relative_change=0.125,
    interval_low=0.11,
    interval_high=0.14,
    noise_rel=0.008,
    n_base=30,
    n_head=32,
    p_value=1e-4,
    q_value=1e-3,
    needed_processes=None,
    environment_differs=False,
    reason="the whole interval lies above the relevance",
)
UNMEASURED = {
    "base_value": None,
    "head_value": None,
    "relative_change": None,
    "interval_low": None,
    "interval_high": None,
    "noise_rel": None,
}


def case(verdict, **changes):
    """A case with that verdict; `benchmark` and `params` change its key."""
    key = {
        name: changes.pop(name) for name in ("benchmark", "params", "machine") if name in changes
    }
    changed = dataclasses.replace(KEY, **key)
    return dataclasses.replace(REGRESSION, key=changed, verdict=verdict, **changes)


def comparison(*cases, verdict=None):
    counts = Counter(item.verdict for item in cases)
    return Comparison(cases, {item: counts[item] for item in Verdict}, verdict or cases[0].verdict)
