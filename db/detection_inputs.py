"""What a detector is told of each stored case: its values in order, and what moved beside them.

A case whose declared dependencies changed goes on in another series, because a variant is part of a
series' identity. Series that follow each other without overlap are one line here, so that what a
commit's new dependencies cost is a change like any other.
"""

from __future__ import annotations

import json
from collections import defaultdict
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

import pandas as pd
from sqlalchemy import select

from db.change_points import Observed
from db.models import Benchmark, Result, Runner, RunnerEnvironment, Series, Variant, Window
from db.peers import is_peer
from db.queries import history
from db.session import chunks
from db.window_queries import windows

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from sqlalchemy.orm import Session

CLOCKS: Final = ("sm_clock_mhz", "memory_clock_mhz")  # counters that explain a like change


@dataclass(frozen=True, slots=True)
class Line:
    """One case on one machine over the commits of the main branch, whatever it depended on."""

    machine_id: int
    benchmark: str
    series_ids: tuple[int, ...]  # of each result
    commits: tuple[str, ...]  # of each result
    observed: Observed


def lines(session: Session) -> list[Line]:
    """Give every case that is ours to watch; peers are other people's code."""
    found = []
    watched = _with_windows(session)
    for members in _groups(session):
        frames = [frame for one in members if len(frame := _results(session, one))]
        for chain in _chains(frames):
            first = members[0]
            found.append(_line(session, first, pd.concat(chain), watched))
    return found


def _groups(session: Session) -> list[list[Any]]:
    """Group the series that differ in what they depend on alone."""
    query = (
        select(
            Series.id,
            Series.machine_id,
            Series.params,
            Series.metric_id,
            Benchmark.name,
            Benchmark.version,
            Variant.python,
            Variant.requirements,
            Variant.env_vars,
        )
        .join(Benchmark, Benchmark.id == Series.benchmark_id)
        .join(Variant, Variant.id == Series.variant_id)
        .order_by(Series.id)
    )
    groups: dict[tuple[Any, ...], list[Any]] = defaultdict(list)
    for row in session.execute(query):
        if not is_peer(row.name, row.params):
            variables = json.dumps(row.env_vars, sort_keys=True)
            case = (row.name, row.version, row.params, row.metric_id, row.machine_id)
            groups[(*case, variables)].append(row)
    return list(groups.values())


def _results(session: Session, member: Any) -> pd.DataFrame:  # noqa: ANN401 - a row of _groups
    """Give a series' results on the main branch, with what it declares to depend on."""
    frame = history(session, member.id, main_only=True)
    needs = json.dumps(member.requirements, sort_keys=True)
    return frame.assign(series_id=member.id, declared=f"python {member.python} {needs}")


def _chains(frames: Sequence[pd.DataFrame]) -> list[list[pd.DataFrame]]:
    """Join series that follow each other; those measured side by side stay apart."""
    ordered = sorted(frames, key=lambda frame: frame["commit_date"].min())
    follows = [
        before["commit_date"].max() < after["commit_date"].min()
        for before, after in pairwise(ordered)
    ]
    if not all(follows):
        return [[frame] for frame in ordered]
    return [ordered] if ordered else []


def _with_windows(session: Session) -> frozenset[int]:
    """Give the series of which any result has telemetry; the others need not be asked."""
    query = select(Result.series_id).join(Window, Window.result_id == Result.id).distinct()
    return frozenset(session.scalars(query))


def _line(
    session: Session,
    first: Any,  # noqa: ANN401 - a row of _groups
    results: pd.DataFrame,
    watched: frozenset[int],
) -> Line:
    ids = results["result_id"].astype(int).tolist()
    environments = _environments(session, ids)
    asked = [one for one in results["series_id"].unique().tolist() if one in watched]
    readings = _readings(session, asked).reindex(ids)
    declared = results["declared"].tolist()
    known = [environments.get(one) for one in ids]
    observed = Observed(
        results["value"].to_numpy(),
        spread=(results["q75"] - results["q25"]).to_numpy(),
        covariates={name: readings[name].to_numpy(dtype=float) for name in CLOCKS},
        epochs=[None if one is None else _imposed(one) for one in known],
        runners=[None if pd.isna(one) else one for one in readings["runner"]],
        dependencies=[
            f"{needs} {'' if one is None else one.runtime or ''}"
            for needs, one in zip(declared, _last_known(known), strict=True)
        ],
    )
    return Line(
        first.machine_id,
        first.name,
        tuple(results["series_id"].astype(int).tolist()),
        tuple(results["commit"].tolist()),
        observed,
    )


def _imposed(environment: RunnerEnvironment) -> tuple[Any, ...]:
    """Give what the machine and no commit decides."""
    return (
        environment.runner_id,
        environment.driver,
        environment.power_limit_w,
        environment.clock_policy,
    )


def _last_known(found: Iterable[RunnerEnvironment | None]) -> list[RunnerEnvironment | None]:
    """Let a result of an unknown environment have the one before it, the first ones the next."""
    told = list(found)
    known = [one for one in told if one is not None]
    last = known[0] if known else None
    filled = []
    for one in told:
        last = last if one is None else one
        filled.append(last)
    return filled


def _environments(session: Session, result_ids: Sequence[int]) -> dict[int, RunnerEnvironment]:
    found: dict[int, RunnerEnvironment] = {}
    for chunk in chunks(result_ids):
        query = (
            select(Result.id, RunnerEnvironment)
            .join(RunnerEnvironment, RunnerEnvironment.id == Result.runner_environment_id)
            .where(Result.id.in_(chunk))
        )
        found.update({row[0]: row[1] for row in session.execute(query)})
    return found


def _readings(session: Session, series_ids: Iterable[int]) -> pd.DataFrame:
    """Give each result's clocks, the median over its windows, and the runner it ran on."""
    frames = [windows(session, series_id=int(one)) for one in series_ids]
    if not frames:
        return pd.DataFrame(columns=[*CLOCKS, "runner"])
    seen = pd.concat([one.reindex(columns=["result_id", *CLOCKS]) for one in frames])
    clocks = seen.astype(float).groupby("result_id").median()
    runners: dict[int, str] = {}
    for chunk in chunks(clocks.index.astype(int).tolist()):
        query = (
            select(Window.result_id, Runner.uid)
            .join(RunnerEnvironment, RunnerEnvironment.id == Window.runner_environment_id)
            .join(Runner, Runner.id == RunnerEnvironment.runner_id)
            .where(Window.result_id.in_(chunk))
        )
        runners.update((one, uid) for one, uid in session.execute(query) if one is not None)
    clocks["runner"] = pd.Series(runners, dtype=object).reindex(clocks.index)
    return clocks
