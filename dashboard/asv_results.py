"""Read from asv's own result files which cases of one run failed, and what was written since."""

import json
from collections.abc import Collection, Iterator
from itertools import product
from pathlib import Path
from typing import Any

from dashboard.words import case_name


def failed_cases(
    results_dir: Path, commit: str, since_ms: float, among: Collection[str] | None = None
) -> list[str]:
    """Return the name of each case of `commit` that failed since `since_ms`.

    asv keeps older rows of benchmarks that were not run again in the same file; they are not
    looked at. Nor are cases that are not `among` those asked for: an older failure may share a row.
    A case that failed is null, a case that was skipped or not selected is NaN.
    """
    return [
        case
        for name, row in _rows(results_dir, commit)
        if (row.get("started_at") or 0.0) >= since_ms
        for case in _failed(name, row)
        if among is None or case in among
    ]


def has_results_since(
    results_dir: Path, commit: str, benchmarks: Collection[str], since_ms: float
) -> bool:
    """Say whether asv has written each of these benchmarks (any, if none is named) since then."""
    rows = _rows(results_dir, commit)
    found = {name for name, row in rows if (row.get("started_at") or 0.0) >= since_ms}
    return bool(found) and found.issuperset(benchmarks)


def _rows(results_dir: Path, commit: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Give name and columns of each benchmark in the files of a commit."""
    for path in sorted(results_dir.glob(f"*/{commit[:8]}*.json")):
        file = json.loads(path.read_text(encoding="utf-8"))
        if file["commit_hash"] == commit:
            for name, row in file["results"].items():
                yield name, dict(zip(file["result_columns"], row, strict=False))


def _failed(name: str, row: dict[str, Any]) -> Iterator[str]:
    cells = list(product(*(row.get("params") or [])))
    values = row.get("result")
    if values is None:
        values = [None] * len(cells)
    for cell, value in zip(cells, values, strict=True):
        if value is None:
            yield case_name(name, ", ".join(cell))
