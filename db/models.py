"""The tables: what one stored thing is and what identifies it.

A result belongs to a series (one case on one machine under one variant) and a commit; windows
carry what the meters saw while a case ran. Nothing here queries, commits or decides. Instants
taken by a clock of a runner are epoch numbers with their unit in the name (`started_at_ms`);
everything else is a timezone-aware UTC datetime.
"""

import datetime as dt

from sqlalchemy import (
    BigInteger,
    CheckConstraint,
    ForeignKey,
    Index,
    String,
    Text,
    UniqueConstraint,
)
from sqlalchemy.orm import Mapped, mapped_column

from db.alert_models import AlertNotice
from db.columns import (
    Base,
    Digest,
    Direction,
    Key,
    Name,
    OrderBasis,
    Sha,
    Status,
)
from db.triage_models import (
    Alert,
    AlertEvent,
    Annotation,
    ChangePoint,
    DetectorState,
    Revision,
    User,
)

__all__ = [
    "Alert",
    "AlertEvent",
    "AlertNotice",
    "Annotation",
    "Benchmark",
    "Ceiling",
    "ChangePoint",
    "Commit",
    "DetectorState",
    "Exclusion",
    "Machine",
    "Metric",
    "Result",
    "Revision",
    "Run",
    "Runner",
    "RunnerEnvironment",
    "Sample",
    "Series",
    "User",
    "Variant",
    "Window",
    "WindowCounter",
    "WindowStage",
]


class Commit(Base):
    """A version of the code that was measured."""

    __tablename__ = "commits"

    id: Mapped[Key]
    sha: Mapped[Sha] = mapped_column(unique=True, comment="full hash; a made-up one if external")
    committed_at: Mapped[dt.datetime] = mapped_column(index=True)
    authored_at: Mapped[dt.datetime | None] = mapped_column(comment="NULL = repository not seen")
    subject: Mapped[str | None] = mapped_column(Text, comment="NULL = repository not seen")
    branch: Mapped[str | None] = mapped_column(
        String(200), comment="the main branch if on its first-parent chain, else NULL"
    )
    position: Mapped[int | None] = mapped_column(comment="rank among the commits of its source")
    order_basis: Mapped[OrderBasis] = mapped_column(comment="where position comes from")
    external: Mapped[bool] = mapped_column(comment="measured elsewhere, code not in this history")
    merge_base: Mapped[str | None] = mapped_column(
        String(64), comment="newest commit of the main branch that it holds; NULL = not known"
    )
    merge_base_position: Mapped[int | None] = mapped_column(comment="rank of merge_base")
    side_branch: Mapped[str | None] = mapped_column(
        String(200),
        comment="branch that has it where the main one has not; NULL = none, or not known",
    )


class Machine(Base):
    """A stable label under which results stay comparable."""

    __tablename__ = "machines"

    id: Mapped[Key]
    name: Mapped[Name] = mapped_column(unique=True)
    arch: Mapped[str | None] = mapped_column(String(200))
    cpu: Mapped[str | None] = mapped_column(String(200))
    num_cpu: Mapped[str | None] = mapped_column(String(200), comment="free text, as asv has it")
    os: Mapped[str | None] = mapped_column(String(200))
    ram: Mapped[str | None] = mapped_column(String(200), comment="free text, as asv has it")


class Runner(Base):
    """The device that did the work under a machine's label."""

    __tablename__ = "runners"
    __table_args__ = (UniqueConstraint("machine_id", "uid"),)

    id: Mapped[Key]
    machine_id: Mapped[int | None] = mapped_column(ForeignKey("machines.id"))
    uid: Mapped[Name] = mapped_column(comment="GPU UUID, else kind and name of the device")
    kind: Mapped[str] = mapped_column(String(16), comment="cpu or cuda")
    name: Mapped[Name]
    num_sms: Mapped[int | None] = mapped_column(comment="streaming multiprocessors")


class RunnerEnvironment(Base):
    """What the machine imposes on a result; a change of it opens an epoch."""

    __tablename__ = "runner_environments"

    id: Mapped[Key]
    runner_id: Mapped[int] = mapped_column(ForeignKey("runners.id"))
    driver: Mapped[str | None] = mapped_column(String(200))
    runtime: Mapped[str | None] = mapped_column(String(200))
    power_limit_w: Mapped[float | None] = mapped_column(comment="enforced board limit")
    clock_policy: Mapped[str | None] = mapped_column(
        String(200), comment="such as locked at 1500 MHz; NULL = not known"
    )
    digest: Mapped[Digest] = mapped_column(unique=True, comment="of everything above")


class Variant(Base):
    """What a commit declares about its environment: no path, no machine."""

    __tablename__ = "variants"

    id: Mapped[Key]
    label: Mapped[str] = mapped_column(Text, comment="for people")
    python: Mapped[str] = mapped_column(String(200), comment="interpreter version as declared")
    requirements: Mapped[dict[str, str]]
    env_vars: Mapped[dict[str, str]]
    digest: Mapped[Digest] = mapped_column(unique=True, comment="of everything but the label")


class Run(Base):
    """One invocation's results of one commit on one machine, as one file carried them."""

    __tablename__ = "runs"
    __table_args__ = (UniqueConstraint("commit_id", "machine_id", "variant_id", "source_digest"),)

    id: Mapped[Key]
    commit_id: Mapped[int] = mapped_column(ForeignKey("commits.id"))
    machine_id: Mapped[int] = mapped_column(ForeignKey("machines.id"))
    variant_id: Mapped[int] = mapped_column(ForeignKey("variants.id"))
    invocation: Mapped[str | None] = mapped_column(
        String(200), comment="id given by the command that ran it; NULL = plain asv"
    )
    source_digest: Mapped[Digest] = mapped_column(comment="of the result file's bytes")
    ingested_at: Mapped[dt.datetime]
    findings: Mapped[list[str] | None] = mapped_column(
        comment="what doctor said of the machine; NULL = not asked"
    )


class Benchmark(Base):
    """A suite's method in one version of its code."""

    __tablename__ = "benchmarks"
    __table_args__ = (UniqueConstraint("name", "version"),)

    id: Mapped[Key]
    name: Mapped[str] = mapped_column(String(500), comment="module.Class.method")
    version: Mapped[str] = mapped_column(
        String(200), comment="changes when the number's meaning does"
    )
    kind: Mapped[str] = mapped_column(String(32), comment="asv's type")
    param_names: Mapped[list[str]]


class Metric(Base):
    """What a number means."""

    __tablename__ = "metrics"
    __table_args__ = (UniqueConstraint("name", "unit", "direction"),)

    id: Mapped[Key]
    name: Mapped[Name]
    unit: Mapped[Name]
    direction: Mapped[Direction] = mapped_column(comment="which way is better")


class Series(Base):
    """Results of one case on one machine under one variant: the unit of all statistics."""

    __tablename__ = "series"
    __table_args__ = (
        UniqueConstraint("benchmark_id", "params", "metric_id", "machine_id", "variant_id"),
    )

    id: Mapped[Key]
    benchmark_id: Mapped[int] = mapped_column(ForeignKey("benchmarks.id"))
    params: Mapped[str] = mapped_column(Text, comment="canonical: name=value, name=value")
    metric_id: Mapped[int] = mapped_column(ForeignKey("metrics.id"))
    machine_id: Mapped[int] = mapped_column(ForeignKey("machines.id"), index=True)
    variant_id: Mapped[int] = mapped_column(ForeignKey("variants.id"))
    judged: Mapped[int | None] = mapped_column(
        BigInteger, comment="digest of what the detector saw last; NULL = judge it"
    )


class Result(Base):
    """All samples of a case for a commit on a machine, summed up."""

    __tablename__ = "results"
    __table_args__ = (
        # Commits arrive one after the other, so this index grows at its end.
        UniqueConstraint("commit_id", "series_id", "started_at_ms", "digest"),
        # All that listing the series needs, so that it reads no row of a million.
        Index(None, "series_id", "commit_id", "dirty", "exclusion_id"),
        # Spelt out, because SQLite builds a table for each IN and each row: 4 of 12 us a row.
        CheckConstraint(" OR ".join(f"status = '{one.value}'" for one in Status), name="status"),
        CheckConstraint(
            "(value IS NOT NULL) = (status = 'ok' OR status = 'single-sample')",
            name="value_iff_measured",
        ),
    )

    id: Mapped[Key]
    series_id: Mapped[int] = mapped_column(ForeignKey("series.id"))
    commit_id: Mapped[int] = mapped_column(ForeignKey("commits.id"))
    run_id: Mapped[int] = mapped_column(ForeignKey("runs.id"))
    runner_environment_id: Mapped[int | None] = mapped_column(
        ForeignKey("runner_environments.id"), comment="NULL = no window said"
    )
    started_at_ms: Mapped[int | None] = mapped_column(
        BigInteger, comment="epoch of the last round's start; NULL = not recorded"
    )
    digest: Mapped[Digest] = mapped_column(comment="of value, statistics and samples as recorded")
    duration_s: Mapped[float | None] = mapped_column(comment="of all cases of the benchmark")
    status: Mapped[Status]
    value: Mapped[float | None] = mapped_column(comment="median, in the metric's unit")
    q25: Mapped[float | None]
    q75: Mapped[float | None]
    ci_low: Mapped[float | None] = mapped_column(comment="99 % interval; NULL = unbounded")
    ci_high: Mapped[float | None] = mapped_column(comment="99 % interval; NULL = unbounded")
    number: Mapped[int | None] = mapped_column(comment="calls timed together")
    n: Mapped[int | None] = mapped_column(comment="samples; NULL = not recorded")
    dirty: Mapped[bool] = mapped_column(comment="measured on an edited checkout")
    exclusion_id: Mapped[int | None] = mapped_column(
        ForeignKey("exclusions.id"), comment="NULL = it counts"
    )


class Exclusion(Base):
    """Results that somebody left out of everything that is concluded."""

    __tablename__ = "exclusions"
    __table_args__ = (
        CheckConstraint("(lifted_by IS NULL) = (lifted_at IS NULL)", name="lifted_by_someone"),
    )

    id: Mapped[Key]
    author: Mapped[Name] = mapped_column(comment="who left them out")
    reason: Mapped[str] = mapped_column(Text)
    what: Mapped[str] = mapped_column(Text, comment="what was named, for people")
    results: Mapped[int] = mapped_column(comment="how many were left out")
    created_at: Mapped[dt.datetime]
    lifted_by: Mapped[str | None] = mapped_column(String(200), comment="NULL = it holds")
    lifted_at: Mapped[dt.datetime | None] = mapped_column(comment="NULL = it holds")


class Sample(Base):
    """One measured value of a result."""

    __tablename__ = "samples"

    result_id: Mapped[int] = mapped_column(
        ForeignKey("results.id", ondelete="CASCADE"), primary_key=True
    )
    position: Mapped[int] = mapped_column(primary_key=True, comment="as recorded, from 0")
    value: Mapped[float] = mapped_column(comment="in the metric's unit")


class Ceiling(Base):
    """Best rates of a device, measured in the same run or from its datasheet."""

    __tablename__ = "ceilings"

    id: Mapped[Key]
    runner_environment_id: Mapped[int] = mapped_column(ForeignKey("runner_environments.id"))
    invocation: Mapped[str | None] = mapped_column(String(200))
    source: Mapped[str] = mapped_column(String(16), comment="measured or datasheet")
    dtype: Mapped[str | None] = mapped_column(String(32), comment="of the matmul")
    read_bytes_per_s: Mapped[float | None]
    matmul_flops_per_s: Mapped[float | None]
    digest: Mapped[Digest] = mapped_column(unique=True, comment="of everything above")


class Window(Base):
    """What one process saw while it measured one case."""

    __tablename__ = "windows"

    id: Mapped[Key]
    uid: Mapped[str] = mapped_column(String(64), unique=True, comment="given by the meter")
    result_id: Mapped[int | None] = mapped_column(
        ForeignKey("results.id", ondelete="SET NULL"), index=True, comment="NULL = unjoined"
    )
    runner_environment_id: Mapped[int] = mapped_column(ForeignKey("runner_environments.id"))
    ceiling_id: Mapped[int] = mapped_column(ForeignKey("ceilings.id"))
    benchmark: Mapped[str] = mapped_column(String(500))
    version: Mapped[str | None] = mapped_column(String(200))
    param_values: Mapped[list[str]] = mapped_column(comment="as asv writes them, in order")
    claimed_commit: Mapped[str | None] = mapped_column(String(64), comment="NULL = not told")
    claimed_machine: Mapped[str | None] = mapped_column(
        String(200), comment="as told, else the only machine of its tree"
    )
    invocation: Mapped[str] = mapped_column(String(200), comment="run id, else the file's name")
    process_number: Mapped[int | None]
    pid: Mapped[int] = mapped_column(BigInteger)
    started_at_s: Mapped[float] = mapped_column(comment="epoch")
    ended_at_s: Mapped[float] = mapped_column(comment="epoch")
    n: Mapped[int]
    median_s: Mapped[float]
    samples_s: Mapped[list[float]]
    timer: Mapped[str] = mapped_column(String(16), comment="wall, cuda_events or external")
    commit_length: Mapped[float | None] = mapped_column(comment="mean tokens committed by a step")
    bytes: Mapped[int | None] = mapped_column(BigInteger, comment="the case must read")
    kv_bytes: Mapped[int | None] = mapped_column(BigInteger, comment="part of bytes: KV rows")
    flops: Mapped[int | None] = mapped_column(BigInteger, comment="the case must do")
    context_tokens: Mapped[int | None] = mapped_column(BigInteger)
    programs: Mapped[int | None] = mapped_column(BigInteger, comment="of the dominant kernel")
    validity: Mapped[list[str]] = mapped_column(comment="what is missing or weak, as codes")
    engine_file: Mapped[str | None] = mapped_column(Text)
    engine_tree: Mapped[str | None] = mapped_column(String(64), comment="git hash of engine/")
    dirty: Mapped[bool | None] = mapped_column(comment="NULL = not known")
    external: Mapped[bool]
    source: Mapped[str | None] = mapped_column(Text, comment="where an external number stands")


class WindowStage(Base):
    """Seconds a stage of the step took in a window."""

    __tablename__ = "window_stages"

    window_id: Mapped[int] = mapped_column(
        ForeignKey("windows.id", ondelete="CASCADE"), primary_key=True
    )
    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    seconds: Mapped[float]


class WindowCounter(Base):
    """A device counter over a window."""

    __tablename__ = "window_counters"

    window_id: Mapped[int] = mapped_column(
        ForeignKey("windows.id", ondelete="CASCADE"), primary_key=True
    )
    name: Mapped[str] = mapped_column(String(64), primary_key=True)
    unit: Mapped[str] = mapped_column(String(32))
    median: Mapped[float | None]
    low: Mapped[float | None] = mapped_column(comment="least reading")
    high: Mapped[float | None] = mapped_column(comment="greatest reading")
    n: Mapped[int | None] = mapped_column(comment="readings")
