"""Read from asv's own result files which cases of one run failed."""

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from dashboard.words import case_name


def failed_cases(results_dir: Path, commit: str, since_ms: float) -> list[str]:
    """Return the name of each case of `commit` that failed since `since_ms`.

    asv keeps older rows of benchmarks that were not run again in the same file; they are not
    looked at. A case that failed is null, a case that was skipped or not selected is NaN.
    """
    paths = sorted(results_dir.glob(f"*/{commit[:8]}*.json"))
    files = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    return [
        case
        for file in files
        if file["commit_hash"] == commit
        for name, row in file["results"].items()
        for case in _failed(name, dict(zip(file["result_columns"], row, strict=False)), since_ms)
    ]


def _failed(name: str, row: dict[str, Any], since_ms: float) -> Iterator[str]:
    if (row.get("started_at") or 0.0) < since_ms:
        return
    cells = list(product(*(row.get("params") or [])))
    values = row.get("result")
    if values is None:
        values = [None] * len(cells)
    for cell, value in zip(cells, values, strict=True):
        if value is None:
            yield case_name(name, ", ".join(cell))
