"""Pages without their rows: how many hold each, and tables of them on host and device.

A page can have several holders and is free once it has none. Tables are known on the host; the
device has a copy, and nothing waits for it. Who the holders are is the ledger's business.
"""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from engine.device import upload_into
from engine.errors import ConfigError, OutOfPagesError

NO_PAGE = -1  # in a table, after the last page of a sequence


class PagePool:
    """Counts the holders of pages; hands free ones out in `order` at first, then the last freed."""

    def __init__(self, num_pages: int, order: Sequence[int] | None = None) -> None:
        if num_pages < 1:
            raise ConfigError(f"num_pages: expected at least 1, got {num_pages} (an empty pool)")
        order = range(num_pages) if order is None else order
        if sorted(order) != list(range(num_pages)):
            raise ConfigError(
                f"page order: expected a permutation of 0..{num_pages - 1}, got {len(order)} ids "
                "(every page is handed out once)"
            )
        self._free = list(reversed(order))
        self._holders = [0] * num_pages

    @property
    def num_pages(self) -> int:
        """Pages there are."""
        return len(self._holders)

    @property
    def num_free(self) -> int:
        """Pages nobody holds."""
        return len(self._free)

    @property
    def free_pages(self) -> tuple[int, ...]:
        """Pages nobody holds, the next one to be handed out first."""
        return tuple(reversed(self._free))

    def num_holders(self, page: int) -> int:
        """Return how many hold `page`."""
        return self._holders[page]

    def take(self, count: int) -> list[int]:
        """Hand out `count` pages, or none at all with an `OutOfPagesError`."""
        if count > len(self._free):
            raise OutOfPagesError(
                f"pages: expected {count} free, got {len(self._free)} of {self.num_pages} "
                "(release a sequence or make the pool larger)"
            )
        pages = [self._free.pop() for _ in range(count)]
        for page in pages:
            self._holders[page] = 1
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """Count one more holder of each of `pages`."""
        for page in pages:
            self._holders[page] += 1

    def drop(self, pages: Iterable[int]) -> None:
        """Count one holder less of each; of those now free the first is handed out next."""
        freed = []
        for page in pages:
            self._holders[page] -= 1
            if not self._holders[page]:
                freed.append(page)
        self._free.extend(reversed(freed))

    def grow(self, num_pages: int) -> None:
        """Add free pages up to `num_pages` in all; they are handed out after those there were."""
        self._free[:0] = reversed(range(self.num_pages, num_pages))
        self._holders += [0] * (num_pages - self.num_pages)


class PageTables:
    """Rows of page ids, -1 after the last page, on the host and on a device; grows by doubling."""

    def __init__(self, device: torch.device) -> None:
        self.host = torch.empty((0, 0), dtype=torch.int32)
        self.ids = self.host if device.type == "cpu" else self.host.to(device)

    def begin(self, row: int) -> None:
        """Make sure that there is a row of this number."""
        if row >= self.host.shape[0]:
            self._resize(max(row + 1, 2 * self.host.shape[0]), self.host.shape[1])

    def put(self, row: int, start: int, pages: Sequence[int]) -> None:
        """Enter `pages` from entry `start` of a row on."""
        if not pages:
            return
        end = start + len(pages)
        self._widen(end)
        self.host[row, start:end] = torch.tensor(pages, dtype=torch.int32)
        if self.ids is not self.host:
            upload_into(self.ids[row, start:end], self.host[row, start:end])

    def clear(self, row: int, start: int) -> None:
        """Empty a row from entry `start` on."""
        self.host[row, start:] = NO_PAGE
        if self.ids is not self.host:
            self.ids[row, start:] = NO_PAGE

    def select(self, rows: Sequence[int], width: int) -> Tensor:
        """Return a copy of the first `width` entries of `rows`, `[N, width] int32`."""
        self._widen(width)
        if not rows:
            return self.ids.new_empty(0, width)
        return torch.stack([self.ids[row, :width] for row in rows])  # nothing has to go up

    def lookup(self, row: int, entries: Tensor) -> Tensor:
        """Return the page ids at `entries` of a row as int64, where the entries are."""
        table = self.host if entries.device.type == "cpu" else self.ids
        return table[row].index_select(0, entries).long()

    def _widen(self, width: int) -> None:
        rows, held = self.host.shape
        if width > held:
            self._resize(rows, max(width, 2 * held))

    def _resize(self, rows: int, width: int) -> None:
        is_shared = self.ids is self.host
        self.host = _padded(self.host, rows, width)
        self.ids = self.host if is_shared else _padded(self.ids, rows, width)


def _padded(table: Tensor, rows: int, width: int) -> Tensor:
    grown = table.new_full((rows, width), NO_PAGE)
    grown[: table.shape[0], : table.shape[1]] = table
    return grown
