"""Which series a reader asks for: filters over the table of series, and names that tell them apart.

Knows the columns of `db.queries.series`, nothing of browsers or of databases.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Final

import pandas as pd

# A parameter's column, and its name in a URL, so that none collides with a column of the table.
PARAM_PREFIX: Final = "p."
# The name of a parameter may be several words.
_PARAM: Final = re.compile(r"([^=,]+)=(.*?)(?:, (?=[^=,]+=)|$)")
# Parts of a series' identity that readers know it by, and those that matter only between twins.
_NAMES: Final = ("benchmark", "params", "machine")
_TWINS: Final = ("metric", "version", "variant")
_LEAST_OF_VERSION: Final = 8  # characters


def with_param_columns(series: pd.DataFrame) -> pd.DataFrame:
    """Add a column for each parameter; series without that parameter have none there."""
    parsed = pd.DataFrame(
        [
            {PARAM_PREFIX + name: value for name, value in parse_params(params).items()}
            for params in series["params"]
        ],
        index=series.index,
        dtype=object,
    )
    return pd.concat([series, parsed], axis="columns")


def parse_params(params: str) -> dict[str, str]:
    """Take canonical parameters ("context=1024, page_size=16") apart, keeping their order."""
    return {name: value for name, value in _PARAM.findall(params) if name}


def param_columns(series: pd.DataFrame) -> list[str]:
    """Name the parameter columns in which any of the series has a value."""
    known = [column for column in series if str(column).startswith(PARAM_PREFIX)]
    return [str(column) for column in known if series[column].notna().any()]


def choices(series: pd.DataFrame, column: str) -> list[str]:
    """Give the distinct values of a column, numbers by size and text by alphabet."""
    return sorted({str(value) for value in series[column].dropna()}, key=_natural)


def narrow(series: pd.DataFrame, column: str, values: Sequence[str]) -> pd.DataFrame:
    """Keep the series with one of the values; no value at all asks for everything."""
    if not values:
        return series
    return series[series[column].astype(str).isin(values)]


def twin_columns(series: pd.DataFrame) -> list[str]:
    """Name what tells apart series of one benchmark, parameters and machine; nothing if none are.

    Benchmarks differ in version and metric anyway: that alone is no reason to ask or to tell.
    """
    known = len(series.drop_duplicates([*_NAMES]))
    return [name for name in _TWINS if len(series.drop_duplicates([*_NAMES, name])) > known]


def distinct_names(series: pd.DataFrame) -> list[str]:
    """Name each series by what the others do not share, and by its benchmark if nothing is left."""
    differing = [name for name in _NAMES if len(series[name].unique()) > 1]
    shown = [*differing, *twin_columns(series)] or ["benchmark"]
    length = _version_length(series["version"])
    return [
        " · ".join(_part(name, str(row[name]), length) for name in shown if row[name])
        or str(row["benchmark"])
        for row in series.to_dict("records")
    ]


def link_query(series: Mapping[str, object]) -> dict[str, str]:
    """Give the URL parameters under which the history page shows just this series."""
    params = parse_params(str(series["params"]))
    return {
        "benchmark": str(series["benchmark"]),
        "machine": str(series["machine"]),
        **{PARAM_PREFIX + name: value for name, value in params.items()},
    }


def own_query(series: Mapping[str, object], table: pd.DataFrame) -> dict[str, str]:
    """Give the URL parameters that leave out the series' twins as well.

    `table` holds every series: only where there are twins does the page ask what tells them apart.
    """
    near = table[table["benchmark"] == series["benchmark"]]
    near = near[near["machine"] == series["machine"]]
    return {**link_query(series), **{name: str(series[name]) for name in twin_columns(near)}}


def _part(name: str, value: str, version_length: int) -> str:
    return f"version {value[:version_length]}" if name == "version" else value


def _version_length(versions: pd.Series) -> int:
    """Say how much of a version tells it apart: they are digests as a rule."""
    known = versions.unique()
    longest = max((len(one) for one in known), default=0)
    lengths = range(_LEAST_OF_VERSION, longest)
    return next((one for one in lengths if len({v[:one] for v in known}) == len(known)), longest)


def _natural(text: str) -> tuple[int, float, str]:
    try:
        return (0, float(text), text)
    except ValueError:
        return (1, 0.0, text)
