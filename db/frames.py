"""What queries share: joins to the names of a series, rows as frames."""

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from sqlalchemy import Row, Select, String, cast, func
from sqlalchemy.orm import InstrumentedAttribute

from db.models import Benchmark, Machine, Metric, Series, Variant

AnyRow: TypeAlias = Row[*tuple[Any, ...]]
AnySelect: TypeAlias = Select[*tuple[Any, ...]]


def with_names(query: AnySelect) -> AnySelect:
    """Join a series with what its identity is made of."""
    return (
        query.select_from(Series)
        .join(Benchmark, Benchmark.id == Series.benchmark_id)
        .join(Metric, Metric.id == Series.metric_id)
        .join(Machine, Machine.id == Series.machine_id)
        .join(Variant, Variant.id == Series.variant_id)
    )


def frame_of(rows: Iterable[Sequence[Any]], columns: Sequence[str]) -> pd.DataFrame:
    """Turn rows into a frame whose first columns have the given names."""
    return pd.DataFrame([tuple(row)[: len(columns)] for row in rows], columns=list(columns))


def listed(column: InstrumentedAttribute[int] | InstrumentedAttribute[int | None]) -> Any:  # noqa: ANN401 - an aggregate
    """List a group's whole numbers as one text, in no order: a million come fastest that way."""
    return func.aggregate_strings(cast(column, String), ",")


def numbers(text: str) -> NDArray[np.int64]:
    """Read such a text."""
    return np.fromstring(text, dtype=np.int64, sep=",")
