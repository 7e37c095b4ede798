"""Cases that differ in one parameter alone, called by what they share."""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from db.evidence import EvidencePoint

SHOWN_OF_VERSION = 8  # characters; asv's own versions are hashes


def grouped(
    points: Sequence[EvidencePoint], is_varied: Callable[[str], bool]
) -> dict[str, list[EvidencePoint]]:
    """Group the cases by benchmark, version and every parameter but the varied ones."""
    versions: dict[str, set[str | None]] = defaultdict(set)
    for point in points:
        versions[point.benchmark].add(point.version)
    groups: dict[str, list[EvidencePoint]] = defaultdict(list)
    for point in points:
        kept = [item for item in point.params.split(", ") if not is_varied(item.split("=")[0])]
        several = len(versions[point.benchmark]) > 1
        version = f" version {(point.version or 'unknown')[:SHOWN_OF_VERSION]}" if several else ""
        fixed = f"({', '.join(kept)})" if any(kept) else ""
        groups[f"{point.benchmark}{version}{fixed}"].append(point)
    return groups
