"""Which verdicts of a comparison let a change in, by policies for suites.

[[suites]]                       # the first that fits a case counts; without any, all is required
benchmark = "attention.*"        # a pattern; all benchmarks if absent
metric = "time"                  # a pattern; all metrics if absent
threshold_rel = 0.05             # a smaller regression passes (optional)
required = true                  # false: told, never in the way (optional)

[[acknowledged]]                 # regressions and gaps that somebody answers for
benchmark = "step.Step.time_step"
params = "context=65536*"        # a pattern; all parameters if absent
up_to_rel = 0.2                  # a larger regression does not pass; absent: only gaps do
is_gone = true                   # removed and skipped cases pass (optional)
until = 2027-01-31               # the last day it counts
by = "maintainer@example.org"
reason = "exact masks cost a fifth at 64k"

Asked for `confirmed`, only what fresh pairs of the two commits confirmed is in the way: what one
pass flagged is told and stops nobody. A case that was measured at the base and is failed, removed
or skipped at the head counts whatever is asked for: else deleting a slow benchmark would be the way
past the gate.
"""

from __future__ import annotations

import datetime as dt
import tomllib
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, Final

from db.cases import Verdict, jsonable
from db.errors import DbError
from db.json_files import name_of, read_bytes

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping
    from pathlib import Path

    from db.cases import CaseComparison, Comparison

GONE: Final = frozenset({Verdict.FAILED, Verdict.REMOVED, Verdict.SKIPPED})
UNKNOWN: Final = frozenset({Verdict.INCONCLUSIVE, Verdict.NOT_ENOUGH_HISTORY})
CONFIRMED: Final = "confirmed"
FAIL_ON: Final[dict[str, frozenset[Verdict]]] = {  # what may be asked for, the least first
    CONFIRMED: frozenset({Verdict.REGRESSION}),
    "regression": frozenset({Verdict.REGRESSION}),
    "inconclusive": frozenset({Verdict.REGRESSION}) | UNKNOWN,
}


class GateError(DbError):
    """A file of policies is not what it must be."""


@dataclass(frozen=True, slots=True)
class SuitePolicy:
    """What counts for the cases that two patterns name."""

    benchmark: str = "*"
    metric: str = "*"
    threshold_rel: float = 0.0
    required: bool = True

    def fits(self, case: CaseComparison) -> bool:
        """Say whether a case is meant."""
        return fnmatchcase(case.key.benchmark, self.benchmark) and fnmatchcase(
            case.key.metric, self.metric
        )


@dataclass(frozen=True, slots=True)
class Acknowledged:
    """What somebody answers for, until a day and up to a size."""

    benchmark: str
    until: dt.date
    by: str
    reason: str
    params: str = "*"
    up_to_rel: float = 0.0
    is_gone: bool = False

    def covers(self, case: CaseComparison, today: dt.date) -> bool:
        """Say whether a case passes by it today."""
        is_meant = fnmatchcase(case.key.benchmark, self.benchmark) and fnmatchcase(
            case.key.params, self.params
        )
        if not is_meant or today > self.until:
            return False
        if case.verdict in GONE:
            return self.is_gone and case.verdict is not Verdict.FAILED
        change = case.relative_change
        return change is not None and abs(change) <= self.up_to_rel


@dataclass(frozen=True, slots=True)
class Policies:
    """A file of policies."""

    suites: tuple[SuitePolicy, ...] = ()
    acknowledged: tuple[Acknowledged, ...] = ()

    def of(self, case: CaseComparison) -> SuitePolicy:
        """Give the policy of a case."""
        return next((one for one in self.suites if one.fits(case)), SuitePolicy())


@dataclass(frozen=True, slots=True)
class Stopped:
    """A case that does not pass, or would not, and why."""

    case: CaseComparison
    reason: str

    def to_dict(self) -> dict[str, Any]:
        """Give plain values for strict JSON."""
        return {"case": self.case.key.name, "verdict": self.case.verdict, "reason": self.reason}


@dataclass(frozen=True, slots=True)
class Gate:
    """What a comparison comes to: it passes if nothing required is stopped."""

    stopped: tuple[Stopped, ...]
    informational: tuple[Stopped, ...]  # of suites that are not required
    acknowledged: tuple[Stopped, ...]  # with who answers for it

    @property
    def passes(self) -> bool:
        """Whether the change may go in."""
        return not self.stopped

    def to_dict(self) -> dict[str, Any]:
        """Give plain values for strict JSON."""
        lists = {name: [one.to_dict() for one in getattr(self, name)] for name in self.__slots__}
        return jsonable({"passes": self.passes, **lists})  # type: ignore[no-any-return]


def gate(
    comparison: Comparison,
    fail_on: Collection[Verdict],
    policies: Policies,
    today: dt.date,
    *,
    confirmed_only: bool = False,
) -> Gate:
    """Part the cases that are in the way from those that are only told or answered for.

    `confirmed_only` lets regressions pass that only one pass over all cases flagged.
    """
    stopped: list[Stopped] = []
    informational: list[Stopped] = []
    acknowledged: list[Stopped] = []
    for case in comparison.cases:
        policy = policies.of(case)
        reason = _reason(case, fail_on, policy)
        if reason is None:
            continue
        by = next((one for one in policies.acknowledged if one.covers(case, today)), None)
        if by is not None:
            told = f"acknowledged by {by.by} until {by.until}: {by.reason}"
            acknowledged.append(Stopped(case, told))
        elif confirmed_only and case.verdict is Verdict.REGRESSION and not case.confirmed:
            informational.append(Stopped(case, f"{reason}, not confirmed"))
        else:
            (stopped if policy.required else informational).append(Stopped(case, reason))
    return Gate(tuple(stopped), tuple(informational), tuple(acknowledged))


def _reason(case: CaseComparison, fail_on: Collection[Verdict], policy: SuitePolicy) -> str | None:
    """Say why a case does not pass; None where it does."""
    if case.verdict in GONE:
        had = "measured" if case.base_value is not None else "declared"
        return f"{case.verdict}, and {had} at the base" if case.was_at_base else None
    if case.verdict not in fail_on:
        return None
    change = case.relative_change
    if case.verdict is Verdict.REGRESSION and change is not None:
        if abs(change) < policy.threshold_rel:
            return None
        return f"{case.verdict} of {abs(change):.1%}, at least {policy.threshold_rel:.1%}"
    return case.verdict.value


def read_policies(path: Path) -> Policies:
    """Read a file of policies.

    Raises
    ------
    GateError
        It is no TOML, or holds something that no policy has: a typo must not open the gate.
    """
    return parse_policies(read_bytes(path), str(path))


def parse_policies(content: bytes, where: str) -> Policies:
    """Read policies from what a file holds; `where` says which in errors, those of a file."""
    try:
        found = tomllib.loads(content.decode("utf-8"))
    except ValueError as error:
        raise GateError(f"{where}: expected TOML, got text that is none ({error})") from None
    unknown = sorted(set(found) - {"suites", "acknowledged"})
    if unknown:
        raise GateError(f"{where}: expected suites and acknowledged, got {unknown[0]!r}")
    return Policies(
        tuple(SuitePolicy(**entry) for entry in _entries(found, "suites", SuitePolicy(), where)),
        tuple(Acknowledged(**entry) for entry in _entries(found, "acknowledged", _EXAMPLE, where)),
    )


_EXAMPLE: Final = Acknowledged("", dt.date.max, "", "")
_REQUIRED: Final = {"suites": (), "acknowledged": ("benchmark", "until", "by", "reason")}


def _entries(
    found: Mapping[str, Any], table: str, example: SuitePolicy | Acknowledged, where: str
) -> list[dict[str, Any]]:
    """Check each entry of a table against the fields and types of an example."""
    entries = found.get(table, [])
    if not isinstance(entries, list):
        raise GateError(f"{where}: {table}: expected [[{table}]], got {name_of(entries)}")
    return [_checked(entry, asdict(example), f"{where}: {table}", table) for entry in entries]


def _checked(entry: Any, fields: Mapping[str, Any], where: str, table: str) -> dict[str, Any]:  # noqa: ANN401 - TOML holds anything
    if not isinstance(entry, dict):
        raise GateError(f"{where}: expected a table, got {name_of(entry)}")
    for name, value in entry.items():
        if name not in fields:
            raise GateError(f"{where}: expected {', '.join(fields)}, got {name!r}")
        kind = type(fields[name])
        is_number = kind is float and type(value) is int
        if type(value) is not kind and not is_number:
            raise GateError(f"{where}: {name}: expected {kind.__name__}, got {name_of(value)}")
        if kind is float and not 0.0 <= value < float("inf"):
            raise GateError(f"{where}: {name}: expected a number from 0 on, got {value}")
    missing = [name for name in _REQUIRED[table] if not entry.get(name)]
    if missing:
        raise GateError(f"{where}: {missing[0]}: expected one, got none")
    return dict(entry)
