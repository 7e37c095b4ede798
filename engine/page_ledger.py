"""Who holds which page, in which order: sequences, and the index that keeps pages for later ones.

Sequences that begin alike share pages. Rows behind the committed ones of a sequence always lie in
pages that it holds alone, so what is written there is nobody else's. Knows no rows; all of it is
known on the host.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.errors import CacheError, OutOfPagesError, ShapeError
from engine.page_pool import NO_PAGE, PagePool, PageTables
from engine.prefix_index import PrefixIndex


@dataclass(slots=True)
class Holding:
    """What one sequence holds: a row of the tables, its pages in order, its committed length."""

    row: int
    pages: list[int] = field(default_factory=list)
    length: int = 0


class PageLedger:
    """Says which sequence holds which pages of a pool, with an index of them or without."""

    def __init__(
        self, pool: PagePool, tables: PageTables, page_size: int, index: PrefixIndex | None
    ) -> None:
        self.pool = pool
        self.tables = tables
        self.page_size = page_size
        self.index = index
        self.holdings: dict[int, Holding] = {}
        self._free_rows: list[int] = []

    def holding(self, seq: int) -> Holding:
        """Return what `seq` holds."""
        found = self.holdings.get(seq)
        if found is None:
            raise CacheError(
                f"sequence: expected one of {list(self.holdings)}, got {seq} "
                "(begin it or reserve rows first)"
            )
        return found

    def capacity(self, holding: Holding) -> int:
        """Return the rows, committed and reserved, that the pages can hold."""
        return len(holding.pages) * self.page_size

    def begin(self, seq: int, token_ids: Sequence[int]) -> Holding:
        """Begin `seq` with the indexed pages that hold the beginning of `token_ids`."""
        if seq in self.holdings:
            raise CacheError(f"sequence: expected one that has not begun, got {seq} (release it)")
        holding = self._open(seq)
        if self.index is not None:
            holding.pages = self.index.match(token_ids)
            holding.length = self.capacity(holding)
            self.pool.share(holding.pages)
            self.tables.put(holding.row, 0, holding.pages)
        return holding

    def reserve(self, seq: int, num_rows: int) -> list[int]:
        """Give `seq` pages for `num_rows` rows behind the committed ones; return the new pages."""
        known = self.holdings.get(seq)
        length, held = (known.length, len(known.pages)) if known else (0, 0)
        fresh = self._take(-(-(length + num_rows) // self.page_size) - held)
        holding = known or self._open(seq)
        if fresh:
            self.tables.put(holding.row, held, fresh)
            holding.pages += fresh
        return fresh

    def publish(self, seq: int, token_ids: Sequence[int]) -> None:
        """Index the committed pages of `seq` under the tokens they hold."""
        holding = self.holding(seq)
        if self.index is not None:
            kept = token_ids[: holding.length]
            self.pool.share(self.index.insert(kept, holding.pages))

    def table(self, seqs: Sequence[int], max_pages: int | None) -> Tensor:
        """Return a copy of the tables of `seqs`, as wide as the longest if not `max_pages` wide."""
        holdings = [self.holding(seq) for seq in seqs]
        longest = max((len(holding.pages) for holding in holdings), default=0)
        width = max(1, longest) if max_pages is None else max_pages
        if width < longest:
            raise CacheError(
                f"max_pages: expected at least {longest}, got {width} (pages of a sequence)"
            )
        return self.tables.select([holding.row for holding in holdings], width)

    def slots(self, seq: int, positions: Tensor | Sequence[int]) -> Tensor:
        """Return where `positions` live, on their device; those of the host are checked."""
        holding = self.holding(seq)
        if not isinstance(positions, Tensor):
            if positions:
                self._check_positions(seq, min(positions), max(positions))
            return torch.tensor(self._slots(holding, positions), dtype=torch.int64)
        if positions.ndim != 1 or positions.is_floating_point():
            raise ShapeError(
                f"positions: expected [n] integers, got {list(positions.shape)} {positions.dtype} "
                "(row numbers of one sequence)"
            )
        if positions.device.type == "cpu" and positions.numel():
            self._check_positions(seq, int(positions.min()), int(positions.max()))
        page_ids = self.tables.lookup(holding.row, positions.long() // self.page_size)
        return page_ids * self.page_size + positions % self.page_size

    def slots_behind(self, holding: Holding, offsets: Sequence[int]) -> list[int]:
        """Return where rows behind the committed ones live, known without a tensor."""
        return self._slots(holding, [holding.length + offset for offset in offsets])

    def with_room(self, seq: int, num_rows: int) -> Holding:
        """Return what `seq` holds if `num_rows` rows are reserved behind the committed ones."""
        holding = self.holding(seq)
        room = self.capacity(holding) - holding.length
        if not 0 <= num_rows <= room:
            raise CacheError(
                f"num_rows: expected 0..{room}, got {num_rows} (rows that sequence {seq} reserved)"
            )
        return holding

    def truncate(self, seq: int, length: int) -> tuple[int, int] | None:
        """Keep the pages of the first `length` rows.

        If others hold the last of these and rows of it are to be written again, `seq` gets a page
        of its own in its place; the two are returned, and the rows are to be copied.
        """
        holding = self.holding(seq)
        if not 0 <= length <= holding.length:
            raise CacheError(
                f"length: expected 0..{holding.length}, got {length} (committed rows of {seq})"
            )
        keep = -(-length // self.page_size)
        dropped = holding.pages[keep:]
        self.pool.drop(dropped)
        copied = None
        if length % self.page_size and self.pool.num_holders(holding.pages[keep - 1]) > 1:
            copied = self._replace(holding, keep - 1, dropped)
        self.tables.clear(holding.row, keep)
        del holding.pages[keep:]
        holding.length = length
        return copied

    def release(self, seq: int) -> None:
        """Forget `seq` and drop its pages."""
        self.truncate(seq, 0)
        self._free_rows.append(self.holdings.pop(seq).row)

    def check(self) -> None:
        """Refuse pages, tables and index that disagree; reads the tables back to the host."""
        self._check_tables()
        holders = Counter(page for held in self.holdings.values() for page in held.pages)
        if self.index is not None:
            self.index.check()
            holders.update(self.index.pages)
        free = Counter(self.pool.free_pages)
        for page in range(self.pool.num_pages):
            counted = self.pool.num_holders(page)
            _require(
                holders[page] == counted and free[page] == (0 if counted else 1),
                f"holders of page {page}: expected {holders[page]} (free: "
                f"{0 if holders[page] else 1}), got {counted} (free: {free[page]}) "
                "(a page leaks or is handed out while it is read)",
            )
        for seq, holding in self.holdings.items():
            writable = holding.pages[holding.length // self.page_size :]
            _require(
                all(holders[page] == 1 for page in writable),
                f"pages {writable} of {seq}: expected no other holder, got "
                f"{[holders[page] for page in writable]} (rows will be written there)",
            )

    def _slots(self, holding: Holding, positions: Sequence[int]) -> list[int]:
        size, pages = self.page_size, holding.pages
        return [pages[position // size] * size + position % size for position in positions]

    def _check_positions(self, seq: int, low: int, high: int) -> None:
        capacity = self.capacity(self.holding(seq))
        if low < 0 or high >= capacity:
            raise CacheError(
                f"positions: expected 0..{capacity - 1}, got {low}..{high} "
                f"(what sequence {seq} has pages for; reserve first)"
            )

    def _check_tables(self) -> None:
        on_device, on_host = self.tables.ids.tolist(), self.tables.host.tolist()
        used = {holding.row: (seq, holding) for seq, holding in self.holdings.items()}
        for seq, holding in self.holdings.items():
            _require(
                holding.length <= self.capacity(holding),
                f"length of {seq}: expected at most {self.capacity(holding)}, got "
                f"{holding.length} (rows without a page)",
            )
        for row, table in enumerate(on_device):
            owner, pages = (used[row][0], used[row][1].pages) if row in used else ("nobody", [])
            expected = pages + [NO_PAGE] * (len(table) - len(pages))
            _require(
                table == on_host[row] == expected,
                f"page table of {owner}: expected {pages} and -1 after them, got {table}, on the "
                f"host {on_host[row]} (attention reads pages by this table)",
            )

    def _open(self, seq: int) -> Holding:
        row = self._free_rows.pop() if self._free_rows else len(self.holdings)
        self.tables.begin(row)
        holding = self.holdings[seq] = Holding(row)
        return holding

    def _take(self, count: int) -> list[int]:
        """Take free pages, if need be those that only the index holds."""
        if count <= 0:
            return []
        missing = count - self.pool.num_free
        if missing > 0 and self.index is not None:
            self.pool.drop(self.index.evict(missing, lambda p: self.pool.num_holders(p) == 1))
        return self.pool.take(count)

    def _replace(self, holding: Holding, number: int, dropped: Sequence[int]) -> tuple[int, int]:
        shared = holding.pages[number]
        try:
            (own,) = self._take(1)
        except OutOfPagesError:
            self.pool.share(dropped)  # others hold all of them, or one would have been free
            raise
        self.pool.drop([shared])
        holding.pages[number] = own
        self.tables.put(holding.row, number, [own])
        return shared, own


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise CacheError(message)
