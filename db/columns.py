"""What columns are made of: enumerations stored as text, UTC instants, names of constraints."""

import datetime as dt
import enum
from typing import Annotated, Any, ClassVar

from sqlalchemy import (
    JSON,
    BigInteger,
    DateTime,
    Dialect,
    Double,
    Enum,
    MetaData,
    String,
    TypeDecorator,
)
from sqlalchemy.orm import DeclarativeBase, mapped_column

# Names are needed by the batch mode of migrations, which must find a constraint to drop it.
NAMING = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "ck": "ck_%(table_name)s_%(constraint_name)s",
    "fk": "fk_%(table_name)s_%(column_0_N_name)s_%(referred_table_name)s",
    "pk": "pk_%(table_name)s",
}


class Status(enum.StrEnum):
    """Whether a case gave a value; failed and skipped stay different."""

    OK = "ok"
    FAILED = "failed"
    SKIPPED = "skipped"
    SINGLE_SAMPLE = "single-sample"


class Direction(enum.StrEnum):
    """Which way of a metric is better."""

    LOWER = "lower"
    HIGHER = "higher"


class OrderBasis(enum.StrEnum):
    """Where the order of commits comes from."""

    REPOSITORY = "repository"
    RECORDED = "recorded"
    DATE = "date"


class AlertState(enum.StrEnum):
    """Where an alert stands with the people who were told."""

    OPEN = "open"
    ACKNOWLEDGED = "acknowledged"  # somebody has seen it
    CONFIRMED = "confirmed"  # a re-run or a person says that it is real
    EXPECTED = "expected"  # real, and the price of something wanted
    FALSE_POSITIVE = "false positive"
    FIXED = "fixed"
    WITHDRAWN = "withdrawn"  # the detector does not find it any more


class Role(enum.StrEnum):
    """What a user may do: look, judge findings, or change users as well."""

    VIEWER = "viewer"
    TRIAGER = "triager"
    ADMIN = "admin"


class UtcDateTime(TypeDecorator[dt.datetime]):
    """A timezone-aware UTC instant; SQLite, which drops the zone, gets it back on reading."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: dt.datetime | None, dialect: Dialect) -> dt.datetime | None:
        """Turn an aware instant into UTC."""
        del dialect
        return None if value is None else value.astimezone(dt.UTC)

    def process_result_value(
        self, value: dt.datetime | None, dialect: Dialect
    ) -> dt.datetime | None:
        """Give back an aware UTC instant."""
        del dialect
        if value is None:
            return None
        return value.replace(tzinfo=dt.UTC) if value.tzinfo is None else value.astimezone(dt.UTC)


def _one_of(values: type[enum.StrEnum], name: str, *, checked: bool = True) -> Enum:
    """Store the values of an enumeration as text, under a named CHECK unless the table has one."""
    return Enum(
        values,
        name=name,
        native_enum=False,
        create_constraint=checked,
        length=16,
        values_callable=lambda kind: [member.value for member in kind],
    )


Key = Annotated[int, mapped_column(primary_key=True)]
Digest = Annotated[int, mapped_column(BigInteger)]
Name = Annotated[str, mapped_column(String(200))]
Sha = Annotated[str, mapped_column(String(64))]


class Base(DeclarativeBase):
    """Common ground of all tables: naming convention and column types."""

    metadata = MetaData(naming_convention=NAMING)
    type_annotation_map: ClassVar[dict[Any, Any]] = {
        Status: _one_of(Status, "status", checked=False),
        Direction: _one_of(Direction, "direction"),
        OrderBasis: _one_of(OrderBasis, "order_basis"),
        AlertState: _one_of(AlertState, "state"),
        Role: _one_of(Role, "role"),
        float: Double(),
        dt.datetime: UtcDateTime(),
        list[str]: JSON(),
        list[float]: JSON(),
        dict[str, str]: JSON(),
        dict[str, Any]: JSON(),
    }
