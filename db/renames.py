"""Stored results follow their benchmark's or machine's new name, and join what is there already.

A series whose identity becomes that of another gives it its results; of a measurement that both
have, one stays. Runs after the first with the same settings change nothing.
"""

import re
from collections.abc import Sequence

from sqlalchemy import Connection, delete, exists, select, update
from sqlalchemy.orm import aliased

from db.frames import AnyRow
from db.ingest_settings import Renamed, Settings
from db.labels import canonical_params
from db.models import (
    Alert,
    AlertEvent,
    Annotation,
    Benchmark,
    Ceiling,
    ChangePoint,
    Machine,
    Result,
    Run,
    Runner,
    RunnerEnvironment,
    Series,
    Window,
)
from db.registry import table_of
from db.window_store import digested

SERIES_IDENTITY = ("benchmark_id", "params", "metric_id", "machine_id", "variant_id")


def rename_stored(connection: Connection, settings: Settings) -> int:
    """Bring what is stored under old names under the new ones; give how many were renamed."""
    count = 0
    for one in settings.renamed:
        count += _rename_benchmark(connection, one)
    for old, new in settings.machines.items():
        count += _rename_machine(connection, old, new)
    return count


def _rename_benchmark(connection: Connection, renamed: Renamed) -> int:
    table = table_of(Benchmark)
    rows = connection.execute(select(*table.columns).where(table.c.name == renamed.benchmark)).all()
    rows = [row for row in rows if renamed.fits(row.name, row.version)]
    for row in rows:
        names = renamed.param_names(row.param_names)
        version = renamed.to_version or row.version
        target = connection.scalar(
            select(table.c.id).where(table.c.name == renamed.to, table.c.version == version)
        )
        if target is None:
            target = row.id
            new = {"name": renamed.to, "version": version, "param_names": list(names)}
            connection.execute(update(table).where(table.c.id == row.id).values(new))
        for series in _series(connection, Series.benchmark_id == row.id):
            params = _params_now(series.params, row.param_names, names)
            _move_series(connection, series, {"benchmark_id": target, "params": params})
        if target != row.id:
            connection.execute(delete(table).where(table.c.id == row.id))
    windows = update(table_of(Window)).where(Window.benchmark == renamed.benchmark)
    if renamed.version is not None:
        windows = windows.where(Window.version == renamed.version)
    connection.execute(windows.values(benchmark=renamed.to))
    if renamed.to_version is not None:
        told = Window.benchmark == renamed.to, Window.version == renamed.version
        connection.execute(update(table_of(Window)).where(*told).values(version=renamed.to_version))
    return len(rows)


def _rename_machine(connection: Connection, old: str, new: str) -> int:
    table = table_of(Machine)
    source = connection.scalar(select(table.c.id).where(table.c.name == old))
    if source is None or old == new:
        return 0
    target = connection.scalar(select(table.c.id).where(table.c.name == new))
    connection.execute(
        update(table_of(Window)).where(Window.claimed_machine == old).values(claimed_machine=new)
    )
    if target is None:
        connection.execute(update(table).where(table.c.id == source).values(name=new))
        return 1
    for series in _series(connection, Series.machine_id == source):
        _move_series(connection, series, {"machine_id": target})
    _move_runs(connection, source, target)
    _move_runners(connection, source, target)
    connection.execute(delete(table).where(table.c.id == source))
    return 1


def _series(connection: Connection, condition: object) -> Sequence[AnyRow]:
    return connection.execute(select(*table_of(Series).columns).where(condition)).all()  # type: ignore[arg-type]


def _params_now(params: str, old: Sequence[str], new: Sequence[str]) -> str:
    """Write a case's canonical parameters with the names they have now."""
    pattern = ", ".join(f"{re.escape(name)}=(.*)" for name in old)
    found = re.fullmatch(pattern, params, re.DOTALL)
    return params if found is None else canonical_params(new, found.groups())


def _move_series(connection: Connection, series: AnyRow, new: dict[str, int | str]) -> None:
    """Give a series another identity; where one has it already, give that one all it has."""
    identity = {name: new.get(name, getattr(series, name)) for name in SERIES_IDENTITY}
    table = table_of(Series)
    target = connection.scalar(
        select(table.c.id).where(*(table.c[name] == value for name, value in identity.items()))
    )
    if target is None or target == series.id:
        connection.execute(update(table).where(table.c.id == series.id).values(identity))
        return
    twin = aliased(Result)
    is_double = exists().where(
        twin.series_id == target,
        twin.commit_id == Result.commit_id,
        twin.digest == Result.digest,
    )
    connection.execute(delete(Result).where(Result.series_id == series.id, is_double))
    _drop_double_points(connection, series.id, target)
    for model in (Result, ChangePoint, Annotation):
        moved = table_of(model)
        connection.execute(
            update(moved).where(moved.c.series_id == series.id).values(series_id=target)
        )
    connection.execute(delete(table).where(table.c.id == series.id))


def _drop_double_points(connection: Connection, source: int, target: int) -> None:
    """Of a change point that both series have, the target's stays, with its alert."""
    points = table_of(ChangePoint)
    there = select(points.c.commit_id).where(points.c.series_id == target)
    double = select(points.c.id).where(points.c.series_id == source, points.c.commit_id.in_(there))
    alerts = select(Alert.id).where(Alert.change_point_id.in_(double))
    connection.execute(delete(AlertEvent).where(AlertEvent.alert_id.in_(alerts)))
    connection.execute(delete(Alert).where(Alert.change_point_id.in_(double)))
    connection.execute(delete(ChangePoint).where(ChangePoint.id.in_(double)))


def _move_runs(connection: Connection, source: int, target: int) -> None:
    """Give a machine's runs to another; one that both ingested is one."""
    runs = table_of(Run)
    for run in connection.execute(select(*runs.columns).where(runs.c.machine_id == source)):
        same = connection.scalar(
            select(runs.c.id).where(
                runs.c.machine_id == target,
                runs.c.commit_id == run.commit_id,
                runs.c.variant_id == run.variant_id,
                runs.c.source_digest == run.source_digest,
            )
        )
        if same is None:
            connection.execute(update(runs).where(runs.c.id == run.id).values(machine_id=target))
        else:
            connection.execute(update(Result).where(Result.run_id == run.id).values(run_id=same))
            connection.execute(delete(runs).where(runs.c.id == run.id))


def _move_runners(connection: Connection, source: int, target: int) -> None:
    """Give a machine's devices to another; of one that both have, the environments are joined."""
    runners = table_of(Runner)
    for runner in connection.execute(
        select(*runners.columns).where(runners.c.machine_id == source)
    ):
        same = connection.scalar(
            select(runners.c.id).where(runners.c.machine_id == target, runners.c.uid == runner.uid)
        )
        if same is None:
            moved = update(runners).where(runners.c.id == runner.id).values(machine_id=target)
            connection.execute(moved)
        else:
            _join_environments(connection, runner.id, same)
            connection.execute(delete(runners).where(runners.c.id == runner.id))


def _join_environments(connection: Connection, source: int, target: int) -> None:
    """Give a device's environments to the same device under its machine's new name."""
    table = table_of(RunnerEnvironment)
    own = ("driver", "runtime", "power_limit_w", "clock_policy")
    rows = connection.execute(
        select(*table.columns).where(table.c.runner_id.in_([source, target]))
    ).all()
    there = {
        tuple(getattr(row, name) for name in own): row.id for row in rows if row.runner_id == target
    }
    for row in (row for row in rows if row.runner_id == source):
        same = there.get(tuple(getattr(row, name) for name in own))
        if same is None:
            identity = {"runner_id": target} | {name: getattr(row, name) for name in own}
            connection.execute(
                update(table).where(table.c.id == row.id).values(digested([identity])[0])
            )
            continue
        for model in (Result, Window, Ceiling):
            joined = table_of(model)
            connection.execute(
                update(joined)
                .where(joined.c.runner_environment_id == row.id)
                .values(runner_environment_id=same)
            )
        connection.execute(delete(table).where(table.c.id == row.id))
