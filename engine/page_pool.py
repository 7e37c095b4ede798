"""Pages without their rows: which are free, and which a sequence has in which order."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from engine.errors import ConfigError, OutOfPagesError

NO_PAGE = -1  # in a table, after the last page of a sequence


class PagePool:
    """The free pages; hands them out in `order` at first, the last given back first later."""

    def __init__(self, num_pages: int, order: Sequence[int] | None = None) -> None:
        if num_pages < 1:
            raise ConfigError(f"num_pages: expected at least 1, got {num_pages} (an empty pool)")
        order = range(num_pages) if order is None else order
        if sorted(order) != list(range(num_pages)):
            raise ConfigError(
                f"page order: expected a permutation of 0..{num_pages - 1}, got {len(order)} ids "
                "(every page is handed out once)"
            )
        self.num_pages = num_pages
        self._free = list(reversed(order))

    @property
    def num_free(self) -> int:
        """Pages without an owner."""
        return len(self._free)

    @property
    def free_pages(self) -> tuple[int, ...]:
        """Pages without an owner, the next one to be handed out first."""
        return tuple(reversed(self._free))

    def take(self, count: int) -> list[int]:
        """Hand out `count` pages, or none at all with an `OutOfPagesError`."""
        if count > len(self._free):
            raise OutOfPagesError(
                f"pages: expected {count} free, got {len(self._free)} of {self.num_pages} "
                "(release a sequence or make the pool larger)"
            )
        return [self._free.pop() for _ in range(count)]

    def give_back(self, pages: Iterable[int]) -> None:
        """Take pages back; the first of them is the next to be handed out."""
        self._free.extend(reversed(list(pages)))


class PageTables:
    """Rows of page ids on a device, -1 after the last page; grows by doubling."""

    def __init__(self, device: torch.device) -> None:
        self.ids = torch.empty((0, 0), dtype=torch.int32, device=device)
        self._free_rows: list[int] = []

    def begin(self) -> int:
        """Return an empty row that is nobody's."""
        if not self._free_rows:
            rows, width = self.ids.shape
            grown = self.ids.new_full((max(1, 2 * rows), width), NO_PAGE)
            grown[:rows] = self.ids
            self._free_rows = list(range(grown.shape[0] - 1, rows - 1, -1))
            self.ids = grown
        return self._free_rows.pop()

    def end(self, row: int) -> None:
        """Empty a row and let it be anybody's."""
        self.clear(row, 0)
        self._free_rows.append(row)

    def put(self, row: int, start: int, pages: Sequence[int]) -> None:
        """Enter `pages` from entry `start` of a row on."""
        self._widen(start + len(pages))
        entries = torch.tensor(pages, dtype=torch.int32, device=self.ids.device)
        self.ids[row, start : start + len(pages)] = entries

    def clear(self, row: int, start: int) -> None:
        """Empty a row from entry `start` on."""
        self.ids[row, start:] = NO_PAGE

    def select(self, rows: Sequence[int], width: int) -> Tensor:
        """Return a copy of the first `width` entries of `rows`, `[N, width] int32`."""
        self._widen(width)
        chosen = torch.tensor(rows, dtype=torch.int64, device=self.ids.device)
        return self.ids[:, :width].index_select(0, chosen)

    def lookup(self, row: int, entries: Tensor) -> Tensor:
        """Return the page ids at `entries` of a row, as int64."""
        return self.ids[row].index_select(0, entries).long()

    def _widen(self, width: int) -> None:
        rows, held = self.ids.shape
        if width > held:
            grown = self.ids.new_full((rows, max(width, 2 * held)), NO_PAGE)
            grown[:, :held] = self.ids
            self.ids = grown
