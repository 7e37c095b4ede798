"""What queries share: joins to the names of a series, rows as frames."""

from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import pandas as pd
from sqlalchemy import Row, Select

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


def frame_of(rows: Iterable[AnyRow], columns: Sequence[str]) -> pd.DataFrame:
    """Turn rows into a frame whose first columns have the given names."""
    return pd.DataFrame([tuple(row)[: len(columns)] for row in rows], columns=list(columns))
