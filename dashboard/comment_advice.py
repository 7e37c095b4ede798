"""What a pull request's comment asks of its reader: one step for each kind of news in it."""

from __future__ import annotations

import glob
import json
from typing import TYPE_CHECKING, Final

from dashboard.markdown import fenced
from dashboard.reproduce import bench_option
from db.compare import Verdict
from db.gate import GONE

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from db.compare import CaseComparison, Comparison

_MARGIN: Final = 1.1  # of an acknowledged change over the one that was measured
_MOST_ENTRIES: Final = 3
_LONGEST_NAME: Final = 300  # a longer one is nobody's to copy


def again(base: str, head: str, case: CaseComparison, profile: str) -> str:
    """Return the command that measures a case of both commits once more."""
    bench = bench_option(case.key.benchmark, case.key.params)
    if case.unit == "seconds":
        return f"ddtree-bench confirm {base} {head} --profile {profile}{bench}"
    return f"ddtree-bench run --profile {profile} --commits '{head}^!'{bench}"


def steps(
    comparison: Comparison,
    answered: Sequence[CaseComparison],
    policy: str,
    ends: tuple[str, str],
    profile: str,
) -> Iterator[str]:
    """Yield what to do, the gravest first; `answered` are the cases somebody answers for."""
    base, head = ends
    open_cases = [case for case in comparison.cases if case not in answered]
    worse = [case for case in open_cases if case.verdict is Verdict.REGRESSION]
    gone = [
        case
        for case in open_cases
        if case.verdict is Verdict.FAILED or (case.verdict in GONE and case.base_value is not None)
    ]
    proven = [case for case in worse if case.confirmed]
    if proven:
        yield from _mend(proven, policy, ends, profile)
    elif worse:
        yield (
            "Nothing is proven yet, and the check does not fail for it: measure it again by the "
            "command under the finding, or label the pull request again.\n"
        )
    if gone:
        yield from _bring_back(gone, policy, head, profile)
    if worse or gone:
        return
    undecided = [case for case in open_cases if case.verdict is Verdict.INCONCLUSIVE]
    if undecided:
        pairs = f"ddtree-bench confirm {base} {head} --profile {profile}"
        yield (
            "Nothing is known to be slower. This measures on what is open, in turns, or label the "
            f"pull request again:\n\n{fenced(pairs)}\n"
        )
    elif any(case.verdict is Verdict.NOT_ENOUGH_HISTORY for case in open_cases):
        yield (
            "Too few samples to judge: label the pull request again, or measure with "
            f"`--profile {profile}`.\n"
        )
    elif comparison.verdict in {Verdict.NO_CHANGE, Verdict.IMPROVEMENT} or answered:
        yield "Nothing to do.\n"
    else:
        yield "Nothing to do: what has no counterpart is compared from the next measurement on.\n"


def _mend(
    cases: Sequence[CaseComparison], policy: str, ends: tuple[str, str], profile: str
) -> Iterator[str]:
    base, head = ends
    first = cases[0].key
    bench = bench_option(first.benchmark, first.params)
    if bench:
        found = f"ddtree-bench bisect {base} {head} --profile {profile}{bench}"
        yield (
            "Mend it: the command under a finding repeats it, and where the pull request has "
            f"several commits this names the one:\n\n{fenced(found)}\n"
        )
    names = list(dict.fromkeys(case.key.benchmark for case in cases))
    entries = [_entry([case for case in cases if case.key.benchmark == name]) for name in names]
    lines = [line for entry in entries[:_MOST_ENTRIES] for line in entry]
    if lines:
        yield (
            "Or answer for it: somebody who may adds this, with day, name and reason, to "
            f"`{policy}` of the target branch (the pull request's own copy is not read):\n\n"
            f"{fenced(*lines, language='toml')}\n"
        )


def _bring_back(
    cases: Sequence[CaseComparison], policy: str, head: str, profile: str
) -> Iterator[str]:
    yield "What was measured at the base must be measured at the head.\n"
    here = [case for case in cases if case.verdict is not Verdict.REMOVED]
    if here:
        bench = bench_option(here[0].key.benchmark, here[0].key.params)
        run = f"ddtree-bench run --profile {profile} --commits '{head}^!'{bench}"
        yield f"This shows why it is not:\n\n{fenced(run)}\n"
    yield (
        "Meant to go? Somebody who answers for it adds an `[[acknowledged]]` entry with "
        f"`is_gone = true` to `{policy}` of the target branch.\n"
    )


def _entry(cases: Sequence[CaseComparison]) -> tuple[str, ...]:
    """Return an entry that acknowledges the cases of a benchmark, patterns escaped and quoted."""
    key = cases[0].key
    if len(key.benchmark) + len(key.params) > _LONGEST_NAME:
        return ()
    up_to = _MARGIN * max(abs(case.relative_change or 0.0) for case in cases)
    is_one = len(cases) == 1 and key.params
    params = [f"params = {json.dumps(glob.escape(key.params))}"] if is_one else []
    return (
        "[[acknowledged]]",
        f"benchmark = {json.dumps(glob.escape(key.benchmark))}",
        *params,
        f"up_to_rel = {up_to:.3g}",
        "until = YYYY-MM-DD",
        'by = "…"',
        'reason = "…"',
    )
