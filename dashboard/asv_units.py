"""What one call of asv measures: a benchmark, a part of a long one, or all that share a cache.

asv writes results when it ends, so a call is what a killed run loses. Most calls have one
benchmark. One of more than `MOST_CASES` cases is cut into parts, which asv joins in its file. Those
with one `setup_cache` stay together: it is what measures them, once, and asv keeps it for a call
only. Cases of a call still take turns over its rounds.
"""

import hashlib
import itertools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dashboard.words import case_name

MOST_CASES = 12  # of a call: a minute or two, and a call of asv begins with a second of its own


@dataclass(frozen=True, slots=True)
class Unit:
    """What one call measures, by asv's names."""

    label: str
    benchmarks: tuple[str, ...]
    cases: tuple[str, ...]  # "<benchmark>(<params>)", or its bare name without parameters
    patterns: tuple[str, ...]  # for asv's --bench: these cases and no others

    @property
    def key(self) -> str:
        """What a journal knows the unit by."""
        return hashlib.sha256("\n".join(self.cases).encode()).hexdigest()[:16]

    def has_more_in(self, others: Iterable["Unit"]) -> bool:
        """Say whether one of the others has cases of the same benchmark."""
        return any(not set(self.benchmarks).isdisjoint(other.benchmarks) for other in others)


def whole(bench: str | None) -> Unit:
    """Return the unit of all that a regular expression selects, for runs too short to divide."""
    patterns = () if bench is None else (bench,)
    return Unit("all benchmarks", (), (bench or "",), patterns)


def declared(results_dir: Path) -> dict[str, Mapping[str, Any]]:
    """Return the benchmarks that asv found last, by name."""
    content = json.loads((results_dir / "benchmarks.json").read_text(encoding="utf-8"))
    return {name: one for name, one in content.items() if name != "version"}


def selected(
    benchmarks: Mapping[str, Mapping[str, Any]], bench: str | None
) -> dict[str, list[str]]:
    """Return the cases of each benchmark that asv selects; benchmarks without any are left out."""
    found = {}
    for name in sorted(benchmarks):
        axes = benchmarks[name]["params"]
        cells = itertools.product(*axes) if axes else [()]
        names = [case_name(name, ", ".join(cell)) for cell in cells]
        chosen = [one for one in names if bench is None or re.search(bench, one)]
        if chosen:
            found[name] = chosen
    return found


def units_of(benchmarks: Mapping[str, Mapping[str, Any]], bench: str | None) -> list[Unit]:
    """Divide what a regular expression selects into calls, in asv's order of names."""
    together: dict[str, list[str]] = {}
    cases = selected(benchmarks, bench)
    for name in cases:
        together.setdefault(benchmarks[name].get("setup_cache_key") or f"alone {name}", []).append(
            name
        )
    return [
        unit
        for names in together.values()
        for unit in _units(
            names, cases, is_cached=bool(benchmarks[names[0]].get("setup_cache_key"))
        )
    ]


def _units(
    names: Sequence[str], cases: Mapping[str, Sequence[str]], *, is_cached: bool
) -> Iterable[Unit]:
    if is_cached:
        label = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} of its cache"
        yield _unit(label, names, [case for name in names for case in cases[name]])
        return
    (name,) = names
    parts = list(_parts(cases[name]))
    for number, part in enumerate(parts, start=1):
        yield _unit(name if len(parts) == 1 else f"{name}, part {number}/{len(parts)}", names, part)


def _parts(cases: Sequence[str]) -> Iterable[Sequence[str]]:
    """Cut cases into the fewest parts that are not too long, of even length."""
    count = -(-len(cases) // MOST_CASES)
    size = -(-len(cases) // count)
    return (cases[start : start + size] for start in range(0, len(cases), size))


def _unit(label: str, names: Sequence[str], cases: Sequence[str]) -> Unit:
    patterns = tuple(f"^{re.escape(case)}$" for case in cases)
    return Unit(label, tuple(names), tuple(cases), patterns)
