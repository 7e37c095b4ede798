"""Check the arrays that describe one series against each other and leave out the gaps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from db.errors import DbError
from db.partition import Logs, rolling_median

if TYPE_CHECKING:
    from collections.abc import Hashable, Mapping, Sequence

    from numpy.typing import ArrayLike, NDArray

STRETCH = 5  # results around one that tell whether it is calm here
NEIGHBOURHOOD = 9  # results around one that tell its usual spread
UNRELIABLE = 5.0  # a result's spread, in that of its neighbours, beyond which it is left out


class SeriesInputError(DbError):
    """The arrays that describe one series do not fit together."""


@dataclass(frozen=True, slots=True)
class Series:
    """The usable results of a series, in order."""

    indices: NDArray[np.int64]  # into the values as given
    given: Logs  # of all values as given; NaN where one is no number above 0
    logs: Logs
    spreads: Logs | None  # usual for the samples around each, relative; None if not all are known
    clocks: tuple[Logs, ...]
    epochs: list[Hashable] | None
    runners: list[Hashable] | None
    dependencies: list[Hashable] | None

    @property
    def is_witnessed(self) -> bool:
        """Whether anything was recorded that could clear the code of a change."""
        return bool(self.clocks) or self.epochs is not None or self.runners is not None


@dataclass(frozen=True, slots=True)
class Labels:
    """Who and what ran each value, as far as it was recorded."""

    epochs: Sequence[Hashable] | None
    runners: Sequence[Hashable] | None
    dependencies: Sequence[Hashable] | None


def usable_series(
    values: ArrayLike,
    spread: ArrayLike | None,
    covariates: Mapping[str, ArrayLike],
    labels: Labels,
) -> Series:
    """Take the results that are numbers above 0, with what is known about each.

    Raises
    ------
    SeriesInputError
        An array is not one-dimensional or its length is not that of the values.
    """
    raw = _vector("values", values, None)
    usable = np.isfinite(raw) & (raw > 0.0)
    given = np.log(np.where(usable, raw, np.nan))
    relative = None if spread is None else _relative(raw, _vector("spread", spread, len(raw)))
    if relative is not None:
        usable &= ~_unreliable(relative)
    indices = np.flatnonzero(usable)
    clocks = [
        _filled(clock[indices])
        for name, column in covariates.items()
        if (clock := _vector(f"covariate {name}", column, len(raw)))[indices].size
    ]
    return Series(
        indices=indices,
        given=given,
        logs=given[indices],
        spreads=None if relative is None else _all_known(relative[indices]),
        clocks=tuple(clock for clock in clocks if clock is not None),
        epochs=_labels("epochs", labels.epochs, len(raw), indices),
        runners=_labels("runners", labels.runners, len(raw), indices),
        dependencies=_labels("dependencies", labels.dependencies, len(raw), indices),
    )


def _vector(name: str, column: ArrayLike, size: int | None) -> NDArray[np.float64]:
    vector = np.asarray(column, dtype=np.float64)
    if vector.ndim != 1 or size not in {None, len(vector)}:
        raise SeriesInputError(
            f"{name}: expected one number for each of the {size} values, got shape {vector.shape}"
        )
    return vector


def _labels(
    name: str, labels: Sequence[Hashable] | None, size: int, indices: NDArray[np.int64]
) -> list[Hashable] | None:
    if labels is None:
        return None
    if len(labels) != size:
        raise SeriesInputError(
            f"{name}: expected one for each of the {size} values, got {len(labels)}"
        )
    known = np.asarray([label is not None for label in labels], dtype=np.bool_)[indices]
    if not known.any():
        return None
    return [labels[indices[position]] for position in _last_known(known)]


def _relative(values: NDArray[np.float64], spread: NDArray[np.float64]) -> Logs:
    """Give each spread in its value; NaN where nobody knows it."""
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(np.isfinite(spread) & (values > 0.0), spread / values, np.nan)


def _all_known(relative: Logs) -> Logs | None:
    """Give the usual spread around each result; None unless each is known and above 0."""
    if not relative.size or not bool((relative > 0.0).all()):
        return None
    return rolling_median(relative, STRETCH)


def _unreliable(relative: Logs) -> NDArray[np.bool_]:
    """Mark results whose samples scattered far more than those of the results around them."""
    if np.isnan(relative).all():
        return np.zeros(len(relative), dtype=np.bool_)
    usual = rolling_median(relative, NEIGHBOURHOOD)
    return relative > UNRELIABLE * usual


def _filled(clock: NDArray[np.float64]) -> Logs | None:
    """Take the log of a clock, its gaps filled with its last reading; None without readings."""
    known = np.isfinite(clock) & (clock > 0.0)
    if not known.any():
        return None
    filled: Logs = np.log(clock[_last_known(known)])
    return filled


def _last_known(known: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Give for each position the last known one, before the first of them the first."""
    last = np.maximum.accumulate(np.where(known, np.arange(len(known)), -1))
    return np.where(last < 0, int(known.argmax()), last)
