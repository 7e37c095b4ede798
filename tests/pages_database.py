"""A database for the tests of the pages: a history with findings, and an incident with telemetry.

Rows are written through the models, seeded and small, so that what a page must show is known.
"""

import datetime as dt
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np
from sqlalchemy import text
from sqlalchemy.orm import Session

from db.alerts import update_alerts
from db.columns import Role
from db.models import (
    Benchmark,
    Ceiling,
    ChangePoint,
    Commit,
    Machine,
    Metric,
    Result,
    Revision,
    Run,
    Runner,
    RunnerEnvironment,
    Series,
    Variant,
    Window,
    WindowCounter,
)
from db.people import set_role
from db.session import open_database

NUM_COMMITS = 60
STEP_AT = 40  # the first commit of the slower level
START = dt.datetime(2026, 3, 1, tzinfo=dt.UTC)
INCIDENT = "rtx-pro-6000"
REPRODUCTION = "h200-1"
HISTORY_MACHINE = "ci-cpu"
PEOPLE = ("anna@example.org", "ben@example.org")
# As measured on an H200 over both kernels at 64k.
READINGS = {
    "triton_serial": {
        "utilization_gpu_pct": 100.0,
        "utilization_memory_pct": 0.0,
        "power_w": 131.0,
        "gpm_sm_active_pct": 5.4,
        "gpm_dram_bandwidth_pct": 0.22,
        "gpm_tensor_pct": 0.36,
    },
    "triton_split": {
        "utilization_gpu_pct": 99.0,
        "utilization_memory_pct": 25.0,
        "power_w": 501.0,
        "gpm_sm_active_pct": 81.0,
        "gpm_dram_bandwidth_pct": 18.0,
        "gpm_tensor_pct": 29.0,
    },
}
KV_ROW_BYTES = 61 * 576 * 2
KV_LAYER_ROW_BYTES = 576 * 2


def sha(index: int, prefix: str = "") -> str:
    """A hash whose first characters differ from commit to commit."""
    return (prefix + f"{(index + 1) * 2654435761 % 2**32:08x}" * 6)[:40]


@dataclass
class Filler:
    """Writes rows; digests only have to differ."""

    session: Session
    digests: Any = field(default_factory=lambda: count(1))

    def add(self, row: Any) -> Any:
        self.session.add(row)
        self.session.flush()
        return row

    def commit(self, index: int, *, basis: str = "repository", **more: Any) -> Commit:
        values = {
            "sha": sha(index),
            "committed_at": START + dt.timedelta(hours=7 * index),
            "subject": f"engine: change number {index} [x] *y*",
            "branch": "main",
            "position": index,
            "order_basis": basis,
            "external": False,
        }
        return self.add(Commit(**(values | more)))

    def run(self, commit: Commit, machine: Machine, variant: Variant) -> Run:
        return self.add(
            Run(
                commit_id=commit.id,
                machine_id=machine.id,
                variant_id=variant.id,
                source_digest=next(self.digests),
                ingested_at=commit.committed_at,
            )
        )

    def result(self, series: Series, run: Run, value: float | None, **more: Any) -> Result:
        values = {
            "series_id": series.id,
            "commit_id": run.commit_id,
            "run_id": run.id,
            "digest": next(self.digests),
            "started_at_ms": 1_780_000_000_000,
            "status": "failed" if value is None else "ok",
            "value": value,
            "q25": None if value is None else value * 0.995,
            "q75": None if value is None else value * 1.006,
            "n": 10,
            "dirty": False,
        }
        return self.add(Result(**(values | more)))

    def series(
        self, name: str, params: str, metric: Metric, machine: Machine, variant: Variant
    ) -> Series:
        benchmark = self.session.query(Benchmark).filter_by(name=name).one_or_none()
        if benchmark is None:
            benchmark = self.add(Benchmark(name=name, version="1", kind="time", param_names=[]))
        return self.add(
            Series(
                benchmark_id=benchmark.id,
                params=params,
                metric_id=metric.id,
                machine_id=machine.id,
                variant_id=variant.id,
            )
        )

    def change(
        self, series: Series, at: int, before: float, after: float, cause: str = "code"
    ) -> ChangePoint:
        commit = self.session.query(Commit).filter_by(sha=sha(at)).one()
        return self.add(
            ChangePoint(
                series_id=series.id,
                commit_id=commit.id,
                before=before,
                after=after,
                relative_change=(after - before) / before,
                p_value=3.2e-9,
                cause=cause,
                detected_at=START,
            )
        )

    def environment(self, machine: Machine, gpu: str, **more: Any) -> RunnerEnvironment:
        runner = self.add(
            Runner(machine_id=machine.id, uid=f"GPU-{gpu}", kind="cuda", name=gpu, num_sms=132)
        )
        return self.add(RunnerEnvironment(runner_id=runner.id, digest=next(self.digests), **more))

    def window(self, result: Result, ceiling: Ceiling, series: str, **more: Any) -> Window:
        values = {
            "uid": f"window-{next(self.digests)}",
            "result_id": result.id,
            "runner_environment_id": ceiling.runner_environment_id,
            "ceiling_id": ceiling.id,
            "benchmark": series,
            "param_values": [],
            "invocation": "run-1",
            "pid": 1,
            "started_at_s": 1.78e9,
            "ended_at_s": 1.78e9 + 1,
            "n": 1,
            "median_s": result.value,
            "samples_s": [result.value],
            "timer": "external",
            "validity": [],
            "external": True,
        }
        return self.add(Window(**(values | more)))

    def counters(self, window: Window, **medians: float) -> None:
        for name, median in medians.items():
            self.add(WindowCounter(window_id=window.id, name=name, unit="%", median=median, n=20))


def build(url: str) -> None:
    """Fill an empty database."""
    engine = open_database(url, must_exist=False)
    with Session(engine) as session, session.begin():
        filler = Filler(session)
        variant = filler.add(
            Variant(label="python 3.11", python="3.11", requirements={}, env_vars={}, digest=1)
        )
        time = filler.add(Metric(name="time", unit="seconds", direction="lower"))
        rate = filler.add(Metric(name="track", unit="tokens/s", direction="higher"))
        _history(filler, variant, time, rate)
        _incident(filler, variant, time)
        _reproduction(filler, variant, time)
        filler.add(Revision(kind="ingest", created_at=START, summary={}))
    engine.dispose()


def build_with_alerts(url: str) -> None:
    """Fill an empty database, open its two alerts, and let `PEOPLE` judge them."""
    build(url)
    engine = open_database(url, must_exist=True)
    with Session(engine) as session, session.begin():
        update_alerts(session, dt.datetime(2026, 3, 20, tzinfo=dt.UTC))
        for email in PEOPLE:
            set_role(session, email, Role.TRIAGER)
    engine.dispose()


def build_empty(url: str) -> None:
    """Make the tables and nothing in them."""
    open_database(url, must_exist=False).dispose()


def rewrite(url: str, *statements: str) -> None:
    """Change what a database holds."""
    engine = open_database(url, must_exist=True)
    with engine.begin() as connection:
        for statement in statements:
            connection.execute(text(statement))
    engine.dispose()


def build_one_commit(url: str, *, name: str = "step.Step.time_step", said: str = "first") -> None:
    """Store two results of one commit on one machine: one measured, one failed."""
    engine = open_database(url, must_exist=False)
    with Session(engine) as session, session.begin():
        filler = Filler(session)
        variant = filler.add(
            Variant(label=said, python="3.11", requirements={}, env_vars={}, digest=1)
        )
        time = filler.add(Metric(name="time", unit="seconds", direction="lower"))
        machine = filler.add(Machine(name=said, cpu=said, num_cpu="2"))
        run = filler.run(filler.commit(0, subject=said), machine, variant)
        for params, value in ((f"text={said}", 0.01), ("text=other", None)):
            series = filler.series(name, params, time, machine, variant)
            filler.result(series, run, value, q25=None, q75=None)
        filler.add(Revision(kind="ingest", created_at=START, summary={}))
    engine.dispose()


def _history(filler: Filler, variant: Variant, time: Metric, rate: Metric) -> None:
    """Two page sizes that both get 9 % slower, a rate that rises; a driver update between."""
    machine = filler.add(Machine(name=HISTORY_MACHINE, cpu="EPYC 9654", num_cpu="2"))
    old = filler.environment(machine, "NVIDIA L4", driver="580.1", power_limit_w=72.0)
    new = filler.environment(machine, "NVIDIA L4 new", driver="590.2", power_limit_w=72.0)
    small = filler.series(
        "step.Step.time_step", "context=1024, page_size=1", time, machine, variant
    )
    large = filler.series(
        "step.Step.time_step", "context=1024, page_size=16", time, machine, variant
    )
    tokens = filler.series("generation.Generation.track_rate", "", rate, machine, variant)
    noise = np.random.default_rng(7).normal(0, 0.006, (NUM_COMMITS, 3))
    for index in range(NUM_COMMITS):
        run = filler.run(filler.commit(index), machine, variant)
        slower = 1.09 if index >= STEP_AT else 1.0
        more = {"runner_environment_id": (old if index < 20 else new).id}
        failed = index == 30
        base = 0.0101 * slower * (1 + noise[index, 0])
        filler.result(small, run, None if failed else base, **more)
        filler.result(large, run, 0.0098 * slower * (1 + noise[index, 1]), **more)
        if index < NUM_COMMITS - 5:
            filler.result(
                tokens, run, 210 * (1.3 if index >= 15 else 1) * (1 + noise[index, 2]), **more
            )
    for series, at, before, after, cause in (
        (small, STEP_AT, 0.0101, 0.0110, "code"),
        (large, STEP_AT, 0.0098, 0.01068, "code"),
        (tokens, 15, 210.0, 273.0, "dependency"),
    ):
        filler.change(series, at, before, after, cause)


def _incident(filler: Filler, variant: Variant, time: Metric) -> None:
    machine = filler.add(Machine(name=INCIDENT))
    commit = filler.commit(
        0, basis="recorded", sha=sha(0, "ffff"), external=True, subject="the original report"
    )
    run = filler.run(commit, machine, variant)
    gpu = filler.environment(machine, "NVIDIA RTX PRO 6000 Blackwell", power_limit_w=600.0)
    ceiling = filler.add(
        Ceiling(
            runner_environment_id=gpu.id, source="datasheet", read_bytes_per_s=1.8e12, digest=11
        )
    )
    sweep = ((1024, 0.008), (32768, 0.159), (65536, 0.357), (131072, 0.714), (189440, 1.43))
    for name, cases in (
        ("incident.Sweep.time_step", sweep),
        ("incident.Probe.time_step", ((65536, 0.327),)),
    ):
        for context, seconds in cases:
            series = filler.series(name, f"context={context}", time, machine, variant)
            result = filler.result(
                series, run, seconds, status="single-sample", n=1, q25=None, q75=None
            )
            kv_bytes = context * KV_ROW_BYTES
            window = filler.window(
                result, ceiling, name, context_tokens=context, bytes=kv_bytes, kv_bytes=kv_bytes
            )
            if "Probe" in name:
                filler.counters(
                    window, utilization_gpu_pct=99.8, utilization_memory_pct=1.2, power_w=133.0
                )


def _reproduction(filler: Filler, variant: Variant, time: Metric) -> None:
    machine = filler.add(Machine(name=REPRODUCTION))
    commit = filler.session.query(Commit).filter_by(sha=sha(NUM_COMMITS - 1)).one()
    run = filler.run(commit, machine, variant)
    gpu = filler.environment(machine, "NVIDIA H200", driver="580.159", power_limit_w=700.0)
    ceiling = filler.add(
        Ceiling(
            runner_environment_id=gpu.id, source="measured", read_bytes_per_s=4.55e12, digest=12
        )
    )
    measured = {
        "triton_serial": (
            (32768, 3595e-6),
            (65536, 7173e-6),
            (131072, 14336e-6),
            (189440, 20726e-6),
        ),
        "triton_split": (
            (32768, 65.4e-6),
            (65536, 101.5e-6),
            (131072, 170.4e-6),
            (189440, 224.6e-6),
        ),
    }
    name = "attention.TreeAttention.time_verify"
    for backend, cases in measured.items():
        for context, seconds in cases:
            params = f"context={context}, backend={backend}"
            series = filler.series(name, params, time, machine, variant)
            result = filler.result(series, run, seconds)
            kv_bytes = context * KV_LAYER_ROW_BYTES
            window = filler.window(
                result,
                ceiling,
                name,
                context_tokens=context,
                bytes=kv_bytes,
                kv_bytes=kv_bytes,
                external=False,
                programs=8 if backend == "triton_serial" else 66,
            )
            if context == 65536:
                filler.counters(window, **READINGS[backend])
