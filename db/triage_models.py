"""The tables of what was found and judged; part of `db.models`, where they are imported from."""

import datetime as dt
from typing import Any

from sqlalchemy import CheckConstraint, ForeignKey, Index, String, Text, UniqueConstraint
from sqlalchemy.orm import Mapped, mapped_column

from db.columns import AlertState, Base, Digest, Key, Name, Role


class ChangePoint(Base):
    """The first result of a new level of a series."""

    __tablename__ = "change_points"
    __table_args__ = (UniqueConstraint("series_id", "commit_id"),)

    id: Mapped[Key]
    series_id: Mapped[int] = mapped_column(ForeignKey("series.id"))
    commit_id: Mapped[int] = mapped_column(ForeignKey("commits.id"))
    before: Mapped[float] = mapped_column(comment="level, in the metric's unit")
    after: Mapped[float] = mapped_column(comment="level, in the metric's unit")
    relative_change: Mapped[float] = mapped_column(comment="(after - before) / before")
    p_value: Mapped[float]
    cause: Mapped[str] = mapped_column(String(32), comment="cause class, or unknown")
    own_cause: Mapped[str | None] = mapped_column(
        String(32), comment="cause told by its series alone; NULL = not found any more"
    )
    detected_at: Mapped[dt.datetime]


class DetectorState(Base):
    """What the marks of judged series rest on: the only row of its table."""

    __tablename__ = "detector_states"

    id: Mapped[Key]
    code: Mapped[Digest] = mapped_column(comment="of the detector; another one judges anew")
    newest_commit_id: Mapped[int] = mapped_column(comment="last commit that was known")
    commit_order: Mapped[Digest] = mapped_column(comment="of the commits up to that one")


class User(Base):
    """A person who may judge findings."""

    __tablename__ = "users"

    id: Mapped[Key]
    email: Mapped[Name] = mapped_column(unique=True)
    name: Mapped[Name]
    role: Mapped[Role]


class Alert(Base):
    """A change point somebody was told about."""

    __tablename__ = "alerts"

    id: Mapped[Key]
    change_point_id: Mapped[int] = mapped_column(ForeignKey("change_points.id"), unique=True)
    state: Mapped[AlertState]
    owner_id: Mapped[int | None] = mapped_column(ForeignKey("users.id"))
    opened_at: Mapped[dt.datetime]


class AlertEvent(Base):
    """One step in the history of an alert."""

    __tablename__ = "alert_events"

    id: Mapped[Key]
    alert_id: Mapped[int] = mapped_column(ForeignKey("alerts.id", ondelete="CASCADE"), index=True)
    user_id: Mapped[int | None] = mapped_column(
        ForeignKey("users.id"), comment="NULL = the service itself"
    )
    state: Mapped[AlertState] = mapped_column(comment="after the step")
    note: Mapped[str | None] = mapped_column(Text)
    created_at: Mapped[dt.datetime]


class Annotation(Base):
    """A remark a person left on a series, a commit or both."""

    __tablename__ = "annotations"
    __table_args__ = (
        CheckConstraint("series_id IS NOT NULL OR commit_id IS NOT NULL", name="has_subject"),
    )

    id: Mapped[Key]
    series_id: Mapped[int | None] = mapped_column(ForeignKey("series.id"), index=True)
    commit_id: Mapped[int | None] = mapped_column(ForeignKey("commits.id"), index=True)
    user_id: Mapped[int] = mapped_column(ForeignKey("users.id"))
    text: Mapped[str] = mapped_column(Text)
    created_at: Mapped[dt.datetime]


class Revision(Base):
    """One transaction that changed what pages show; the newest id is their cache key."""

    __tablename__ = "revisions"
    __table_args__ = (Index(None, "kind", "id"),)

    id: Mapped[Key]
    kind: Mapped[str] = mapped_column(
        String(16), comment="ingest, detect, triage, exclude, prune or rename"
    )
    created_at: Mapped[dt.datetime]
    summary: Mapped[dict[str, Any]] = mapped_column(comment="its counts")
