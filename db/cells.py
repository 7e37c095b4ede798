"""What became of a benchmark's cases, by columns: millions go through here, so nothing is per case.

A case gave a value, failed or was skipped. Equal measurements share a digest, whichever file and
tool they come from.
"""

import math
import struct
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from hashlib import blake2b
from itertools import chain

from db.columns import Status

OK, FAILED, SKIPPED, SINGLE_SAMPLE = (status.value for status in Status)
PACKED = "6dqB"  # six numbers, how many samples, which status by its length
PACKED_BYTES = struct.calcsize(f"<{PACKED}")
NOT_KNOWN = math.nan  # as it is packed


@dataclass(frozen=True, slots=True)
class Cells:
    """One entry a case in every column; the order of the fields is that of a result's columns."""

    status: Sequence[str]
    value: Sequence[float | None]
    q25: Sequence[float | None]
    q75: Sequence[float | None]
    ci_low: Sequence[float | None]
    ci_high: Sequence[float | None]
    number: Sequence[int | None]
    n: Sequence[int | None]
    digest: Sequence[int]
    samples: Sequence[tuple[float, ...]]

    def __len__(self) -> int:
        """Count the cases."""
        return len(self.status)

    @property
    def columns(self) -> tuple[Sequence[float | str | None], ...]:
        """What a result's row holds of a case."""
        return tuple(getattr(self, name) for name in COLUMNS)

    def at(self, places: Sequence[int]) -> "Cells":
        """Give the cases at some places."""
        if len(places) == len(self):
            return self
        every = (getattr(self, one.name) for one in fields(self))
        return Cells(*([column[place] for place in places] for column in every))


COLUMNS = tuple(one.name for one in fields(Cells))[:-1]


def digest_of(content: bytes) -> int:
    """Give a 64-bit number for some bytes, as both databases store it."""
    return int.from_bytes(blake2b(content, digest_size=8).digest(), "big", signed=True)


def digests_of(
    numbers: Sequence[Sequence[float | None]],
    counts: Sequence[int],
    statuses: Sequence[str],
    samples: Sequence[tuple[float, ...]],
) -> Sequence[int]:
    """Give the number that equal measurements share, for each case.

    `numbers` are columns: value, quartiles, interval and calls, in a Cells' order.
    """
    known = [_packable(column) for column in numbers]
    by_case = zip(*known, counts, map(len, statuses), strict=True)
    packed = _packing(len(counts)).pack(*chain.from_iterable(by_case))
    cases = [packed[at : at + PACKED_BYTES] for at in range(0, len(packed), PACKED_BYTES)]
    if any(samples):
        cases = [
            case + array("d", recorded).tobytes()
            for case, recorded in zip(cases, samples, strict=True)
        ]
    digests = b"".join([blake2b(case, digest_size=8).digest() for case in cases])
    return struct.unpack(f">{len(cases)}q", digests)


@lru_cache(maxsize=512)
def _packing(count: int) -> struct.Struct:
    return struct.Struct("<" + PACKED * count)


def _packable(column: Sequence[float | None]) -> Sequence[float | None]:
    if None not in column:
        return column
    return [NOT_KNOWN if one is None else one for one in column]
