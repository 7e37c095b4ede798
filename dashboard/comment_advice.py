"""What a pull request's comment asks of its reader: one step for each kind of news in it."""

from __future__ import annotations

import glob
import json
from typing import TYPE_CHECKING, Final

from dashboard.markdown import fenced
from dashboard.reproduce import bench_option, cases_option
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
    return f"ddtree-bench run --profile {profile} --in-turns --commits '{base}^! {head}^!'{bench}"


def steps(
    comparison: Comparison,
    answered: Sequence[CaseComparison],
    policy: str,
    ends: tuple[str, str],
    profile: str,
) -> Iterator[str]:
    """Yield what to do, the gravest first; `answered` are the cases somebody answers for."""
    open_cases = [case for case in comparison.cases if case not in answered]
    worse = [case for case in open_cases if case.verdict is Verdict.REGRESSION]
    gone = [
        case
        for case in open_cases
        if case.verdict is Verdict.FAILED or (case.verdict in GONE and case.was_at_base)
    ]
    proven = [case for case in worse if case.confirmed]
    if proven:
        yield from _mend(proven, policy, ends, profile)
    elif worse:
        yield (
            "Nothing is proven yet, and the check does not fail for it: the command under the "
            "finding measures both commits again, in turns on one machine. So does labelling the "
            "pull request again.\n"
        )
    if gone:
        yield from _bring_back(gone, policy, ends[1], profile)
    if worse or gone:
        return
    undecided = [case for case in open_cases if case.verdict is Verdict.INCONCLUSIVE]
    if undecided:
        yield from _decide(undecided, ends, profile)
    elif any(case.verdict is Verdict.NOT_ENOUGH_HISTORY for case in open_cases):
        yield (
            "Too few samples to judge: label the pull request again, or measure with "
            f"`--profile {profile}`.\n"
        )
    elif answered:
        yield "Nothing to do: somebody answers for what is slower, or nobody requires its suite.\n"
    elif comparison.verdict in {Verdict.NO_CHANGE, Verdict.IMPROVEMENT}:
        yield "Nothing to do.\n"
    else:
        yield "Nothing to do: what has no counterpart is compared from the next measurement on.\n"


def _decide(cases: Sequence[CaseComparison], ends: tuple[str, str], profile: str) -> Iterator[str]:
    """Say how what is open is decided: by fresh pairs, or where they were not enough elsewhere."""
    base, head = ends
    yield "Nothing is known to be slower.\n"
    waiting = [case for case in cases if not case.confirmed and case.unit == "seconds"]
    bench = cases_option([(case.key.benchmark, case.key.params) for case in waiting])
    if bench:
        pairs = f"ddtree-bench confirm {base} {head} --profile {profile}{bench}"
        yield (
            "This measures on what is open, in turns, and so does labelling the pull request "
            f"again:\n\n{fenced(pairs)}\n"
        )
    elif not all(case.confirmed for case in cases):
        yield "Label the pull request again to measure on what is open.\n"
    if any(case.confirmed for case in cases):
        yield (
            "Pairs in turns left a case open, so more of them on a machine this restless will not "
            "do. This says there what disturbs it; mend that, then label the pull request again:"
            f"\n\n{fenced('ddtree-bench doctor')}\n"
        )


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
    lines = _entries(cases)
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
    missing = [case for case in cases if case.verdict is not Verdict.FAILED]
    lines = _entries(missing, ["is_gone = true"])
    if missing:
        entry = f":\n\n{fenced(*lines, language='toml')}\n" if lines else ".\n"
        yield (
            "Meant to go? Somebody who answers for it adds an `[[acknowledged]]` entry with "
            f"`is_gone = true` to `{policy}` of the target branch{entry}"
        )


def _entries(cases: Sequence[CaseComparison], what: Sequence[str] = ()) -> list[str]:
    """Return the lines of an entry for each benchmark, of a few."""
    names = list(dict.fromkeys(case.key.benchmark for case in cases))
    entries = [
        _entry([case for case in cases if case.key.benchmark == name], what) for name in names
    ]
    return [line for entry in entries[:_MOST_ENTRIES] for line in entry]


def _entry(cases: Sequence[CaseComparison], what: Sequence[str]) -> tuple[str, ...]:
    """Return an entry that acknowledges the cases of a benchmark, patterns escaped and quoted.

    `what` it lets pass; the size that was measured, and a little more, where that is not said.
    """
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
        *(what or [f"up_to_rel = {up_to:.3g}"]),
        "until = YYYY-MM-DD",
        'by = "…"',
        'reason = "…"',
    )
