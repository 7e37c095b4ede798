"""Sidecar lines as rows: the runner and its environment, ceilings, windows and what hangs below.

A window is there if its id is; a second reading adds nothing.
"""

from collections.abc import Sequence
from typing import Any

from sqlalchemy import Connection, insert, select, update

from db.cells import digest_of
from db.models import (
    Ceiling,
    Commit,
    Runner,
    RunnerEnvironment,
    Window,
    WindowCounter,
    WindowStage,
)
from db.registry import Registry, table_of
from db.session import chunks
from db.sidecar import SidecarLine


def store_windows(connection: Connection, lines: Sequence[SidecarLine], machines: Registry) -> int:
    """Store the lines that are not there yet; give their number."""
    uids = [line.window_id for line in lines]
    known: set[str] = set()
    for some in chunks(uids):
        known.update(connection.scalars(select(Window.uid).where(Window.uid.in_(some))))
    fresh = list({line.window_id: line for line in lines if line.window_id not in known}.values())
    if not fresh:
        return 0
    environments = _environments(connection, fresh, machines)
    ceilings = _ceilings(connection, fresh, environments)
    statement = insert(table_of(Window)).returning(Window.id, sort_by_parameter_order=True)
    rows = [
        _window_row(line) | {"runner_environment_id": environment_id, "ceiling_id": ceiling_id}
        for line, environment_id, ceiling_id in zip(fresh, environments, ceilings, strict=True)
    ]
    ids = connection.scalars(statement, rows).all()
    _store_details(connection, dict(zip(ids, fresh, strict=True)))
    external = sorted({line.commit for line in fresh if line.commit and line.provenance.external})
    if external:
        connection.execute(update(Commit).where(Commit.sha.in_(external)).values(external=True))
    return len(fresh)


def _environments(
    connection: Connection, lines: Sequence[SidecarLine], machines: Registry
) -> list[int]:
    """Give every line its runner environment."""
    runners = Registry(connection, Runner, ["machine_id", "uid"]).ids(
        [
            {
                "machine_id": None if line.machine is None else machines.id({"name": line.machine}),
                "uid": line.device.gpu_uuid or f"{line.device.kind}: {line.device.name}",
                "kind": line.device.kind,
                "name": line.device.name,
                "num_sms": line.device.num_sms,
            }
            for line in lines
        ]
    )
    rows = [
        {
            "runner_id": runner_id,
            "driver": line.device.driver,
            "runtime": line.device.runtime,
            "power_limit_w": line.device.power_limit_w,
            "clock_policy": None,
        }
        for line, runner_id in zip(lines, runners, strict=True)
    ]
    return Registry(connection, RunnerEnvironment, ["digest"]).ids(digested(rows))


def _ceilings(
    connection: Connection, lines: Sequence[SidecarLine], environments: Sequence[int]
) -> list[int]:
    """Give every line the ceilings it was measured under."""
    rows = [
        {
            "runner_environment_id": environment_id,
            "invocation": line.invocation,
            "source": line.rates.source,
            "dtype": line.rates.dtype,
            "read_bytes_per_s": line.rates.read_bytes_per_s,
            "matmul_flops_per_s": line.rates.matmul_flops_per_s,
        }
        for line, environment_id in zip(lines, environments, strict=True)
    ]
    return Registry(connection, Ceiling, ["digest"]).ids(digested(rows))


def digested(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Identify rows by all they say: NULLs would make a unique constraint let copies in."""
    return [row | {"digest": digest_of(repr(sorted(row.items())).encode())} for row in rows]


def _window_row(line: SidecarLine) -> dict[str, Any]:
    return {
        "uid": line.window_id,
        "result_id": None,
        "benchmark": line.benchmark,
        "version": line.version,
        "param_values": list(line.params),
        "claimed_commit": line.commit,
        "claimed_machine": line.machine,
        "invocation": line.invocation,
        "process_number": line.process_number,
        "pid": line.pid,
        "started_at_s": line.started_at_s,
        "ended_at_s": line.ended_at_s,
        "n": line.n,
        "median_s": line.median_s,
        "samples_s": list(line.samples_s),
        "timer": line.timer,
        "commit_length": line.commit_length,
        "bytes": line.bytes,
        "kv_bytes": line.kv_bytes,
        "flops": line.flops,
        "context_tokens": line.context_tokens,
        "programs": line.programs,
        "validity": list(line.validity),
        "engine_file": line.provenance.engine_file,
        "engine_tree": line.provenance.engine_tree,
        "dirty": line.provenance.dirty,
        "external": line.provenance.external,
        "source": line.provenance.source,
    }


def _store_details(connection: Connection, windows: dict[int, SidecarLine]) -> None:
    stages = [
        {"window_id": window_id, "name": name, "seconds": seconds}
        for window_id, line in windows.items()
        for name, seconds in line.stage_seconds.items()
    ]
    counters = [
        {
            "window_id": window_id,
            "name": name,
            "unit": counter.unit,
            "median": counter.median,
            "low": counter.low,
            "high": counter.high,
            "n": counter.n,
        }
        for window_id, line in windows.items()
        for name, counter in line.counters.items()
    ]
    if stages:
        connection.execute(insert(table_of(WindowStage)), stages)
    if counters:
        connection.execute(insert(table_of(WindowCounter)), counters)
