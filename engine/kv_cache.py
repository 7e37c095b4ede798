"""Paged storage of KV rows: who owns which page, where a position lives, what a commit keeps.

One `LatentCache` holds the rows of all layers of one model; a page id means the same page in every
layer. Rows `[0, length)` of a sequence are committed; rows from `length` up to the end of its
pages are reserved: a verify pass writes its tree there, and a commit keeps the accepted ones.

::

    position   0 1 2 3 | 4 5 6 7 | 8 ...      page_size 4, length 6
    page table    5    |    2    | -1         slot = page_id * page_size + position % page_size
    state      C C C C | C C . . |            C committed, . reserved

Ownership is kept on the host; page tables are int32 tensors on the cache's device, and nothing on
the way of a write reads the device. What a row means (latent, or keys beside values) is the
model's business.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from engine.config import check_page_size
from engine.errors import CacheError, ConfigError, ShapeError
from engine.page_pool import NO_PAGE, PagePool, PageTables


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The four sizes of a cache; `row_dim` is D, the width of one row of one layer."""

    num_layers: int
    num_pages: int
    page_size: int
    row_dim: int

    def __post_init__(self) -> None:
        check_page_size(self.page_size)
        for name in ("num_layers", "num_pages", "row_dim"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"{name}: expected at least 1, got {getattr(self, name)} (a size of the cache)"
                )


@dataclass(slots=True)
class _Owner:
    """What one sequence holds: a row of the tables, its pages in order, its committed length."""

    row: int
    pages: list[int] = field(default_factory=list)
    length: int = 0


class LatentCache:
    """KV rows of all layers in pages of one of `PAGE_SIZES`.

    Parameters
    ----------
    shape : CacheShape
    dtype, device
        Of the rows. The page tables live on the same device.
    fill : float, optional
        If given, every row that is not committed holds this value until it is written, also after
        its page was used before. NaN makes a read of such a row visible. If None, storage starts
        as zeros and is never cleared; such rows must not matter.
    page_order : sequence of int, optional
        The order in which pages are handed out at first; a permutation of all page ids.
    """

    def __init__(
        self,
        shape: CacheShape,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        fill: float | None = None,
        page_order: Sequence[int] | None = None,
    ) -> None:
        self.shape = shape
        self.fill = fill
        self.pages = torch.full(
            (shape.num_layers, shape.num_pages, shape.page_size, shape.row_dim),
            0.0 if fill is None else fill,
            dtype=dtype,
            device=device,
        )
        self._pool = PagePool(shape.num_pages, page_order)
        self._owners: dict[int, _Owner] = {}
        self._tables = PageTables(self.pages.device)

    @property
    def num_free_pages(self) -> int:
        """Pages no sequence holds."""
        return self._pool.num_free

    @property
    def sequences(self) -> tuple[int, ...]:
        """The sequences that hold a row of the tables, in the order they came."""
        return tuple(self._owners)

    def layer(self, layer: int) -> Tensor:
        """Return the pages of one layer, `[P, L, D]`: a view, mutated by later writes."""
        return self.pages[layer]

    def length(self, seq: int) -> int:
        """Return the committed rows of `seq`."""
        return self._owner(seq).length

    def capacity(self, seq: int) -> int:
        """Return the rows, committed and reserved, that the pages of `seq` can hold."""
        return len(self._owner(seq).pages) * self.shape.page_size

    def reserve(self, seq: int, num_rows: int) -> None:
        """Make sure that `num_rows` rows after the committed ones have pages.

        A sequence begins with its first reserve and ends with `release`. Pages already held are
        used first.

        Raises
        ------
        OutOfPagesError
            Too few pages are free; the cache is as it was.
        CacheError
            `num_rows` is negative.
        """
        if num_rows < 0:
            raise CacheError(f"num_rows: expected at least 0, got {num_rows} (rows to reserve)")
        owner = self._owners.get(seq)
        length, held = (owner.length, len(owner.pages)) if owner else (0, 0)
        needed = -(-(length + num_rows) // self.shape.page_size)
        fresh = self._pool.take(max(0, needed - held))
        if owner is None:
            owner = self._owners[seq] = _Owner(self._tables.begin())
        if not fresh:
            return
        self._tables.put(owner.row, held, fresh)
        owner.pages.extend(fresh)
        self._poison(owner, held * self.shape.page_size)

    def page_table(self, seqs: Sequence[int], *, max_pages: int | None = None) -> Tensor:
        """Return a copy of the page tables of `seqs`.

        Parameters
        ----------
        seqs : sequence of int
        max_pages : int, optional
            Width of the result; the longest of `seqs`, at least 1, if None.

        Returns
        -------
        Tensor
            `[N, max_pages] int32`, contiguous, on the cache's device; -1 after the last page.

        Raises
        ------
        CacheError
            A sequence is unknown, or holds more than `max_pages` pages.
        """
        owners = [self._owner(seq) for seq in seqs]
        longest = max((len(owner.pages) for owner in owners), default=0)
        width = max(1, longest) if max_pages is None else max_pages
        if width < longest:
            raise CacheError(
                f"max_pages: expected at least {longest}, got {width} (pages of a sequence)"
            )
        return self._tables.select([owner.row for owner in owners], width)

    def slots(self, seq: int, positions: Tensor | Sequence[int]) -> Tensor:
        """Return where `positions` of `seq` live.

        Parameters
        ----------
        positions : [n] integer tensor, or a sequence of int
            Positions on the host are checked. A CUDA tensor is trusted, a check would be a sync.

        Returns
        -------
        Tensor
            `[n] int64` on the cache's device, indices into the `[P * L, D]` rows of a layer.

        Raises
        ------
        CacheError
            A position is negative or has no page yet.
        ShapeError
            The positions are not a vector of integers.
        """
        owner = self._owner(seq)
        wanted = _as_positions(positions)
        if wanted.device.type == "cpu" and wanted.numel():
            low, high = int(wanted.min()), int(wanted.max())
            if low < 0 or high >= self.capacity(seq):
                raise CacheError(
                    f"positions: expected 0..{self.capacity(seq) - 1}, got {low}..{high} "
                    f"(what sequence {seq} has pages for; reserve first)"
                )
        wanted = wanted.to(self.pages.device)
        page_size = self.shape.page_size
        page_ids = self._tables.lookup(owner.row, wanted // page_size)
        return page_ids * page_size + wanted % page_size

    def write(self, layer: int, slots: Tensor, rows: Tensor) -> None:
        """Store `rows` of one layer at `slots`, without a host sync.

        Parameters
        ----------
        layer : int
        slots : [n] int64, the cache's device
            As from `slots`; distinct, trusted.
        rows : [n, D], the cache's dtype and device

        Raises
        ------
        ShapeError
            Shapes or the dtype do not fit.
        """
        expected = (*slots.shape, self.shape.row_dim)
        if slots.ndim != 1 or rows.shape != expected or rows.dtype != self.pages.dtype:
            raise ShapeError(
                f"rows: expected [n] slots and [n, {self.shape.row_dim}] {self.pages.dtype}, got "
                f"{list(slots.shape)} and {list(rows.shape)} {rows.dtype} (nothing is cast)"
            )
        self._flat()[layer].index_copy_(0, slots, rows)

    def gather(self, layer: int, seq: int) -> Tensor:
        """Return a copy of the committed rows of `seq` in one layer, `[length, D]` in order."""
        slots = self.slots(seq, torch.arange(self.length(seq)))
        return self._flat()[layer].index_select(0, slots)

    def advance(self, seq: int, num_rows: int) -> None:
        """Commit the first `num_rows` reserved rows as they lie, as after a prefill chunk."""
        owner = self._owner(seq)
        if not 0 <= num_rows <= self.capacity(seq) - owner.length:
            raise CacheError(
                f"num_rows: expected 0..{self.capacity(seq) - owner.length}, got {num_rows} "
                f"(rows that sequence {seq} reserved)"
            )
        owner.length += num_rows

    def commit(self, seq: int, path: Tensor | Sequence[int]) -> int:
        """Keep the root and the accepted path of a verified tree, drop its other rows.

        Node i was written at position `length + i`. Node `path[j]` moves to `length + 1 + j`, in
        every layer. Sources and destinations may overlap: all are read before any is written.
        Pages stay reserved for the next step.

        Parameters
        ----------
        path : [num_accepted] integer tensor, or a sequence of int
            Strictly ascending node ids, root excluded. A CUDA tensor is read back to the host.

        Returns
        -------
        int
            The new length: `length + 1 + num_accepted`.

        Raises
        ------
        CacheError
            The path does not ascend or leaves the reserved rows; the cache is as it was.
        """
        owner = self._owner(seq)
        accepted = path.tolist() if isinstance(path, Tensor) else list(path)
        keep = [0, *accepted]
        room = self.capacity(seq) - owner.length
        if any(a >= b for a, b in zip(keep, accepted, strict=False)) or keep[-1] >= room:
            raise CacheError(
                f"path: expected ascending nodes in 1..{room - 1}, got {accepted} "
                f"(rows that sequence {seq} reserved; the root is kept anyway)"
            )
        self._move(seq, keep)
        owner.length += len(keep)
        self._poison(owner, owner.length)
        return owner.length

    def truncate(self, seq: int, length: int) -> None:
        """Go back to `length` committed rows and give back the pages no longer needed."""
        owner = self._owner(seq)
        if not 0 <= length <= owner.length:
            raise CacheError(
                f"length: expected 0..{owner.length}, got {length} (committed rows of {seq})"
            )
        owner.length = length
        keep = -(-length // self.shape.page_size)
        self._pool.give_back(owner.pages[keep:])
        self._tables.clear(owner.row, keep)
        del owner.pages[keep:]
        self._poison(owner, length)

    def release(self, seq: int) -> None:
        """Forget `seq` and give back all its pages."""
        self.truncate(seq, 0)
        self._tables.end(self._owners.pop(seq).row)

    def check_integrity(self) -> None:
        """Refuse a cache whose pages and tables disagree; reads the tables back to the host.

        Raises
        ------
        CacheError
            A page has two owners or none, a table differs from the pages its sequence holds or
            is not -1 after them, or a sequence is longer than its pages.
        """
        owned = Counter(self._pool.free_pages)
        tables = self._tables.ids.tolist()
        for seq, owner in self._owners.items():
            owned.update(owner.pages)
            padding = [NO_PAGE] * (self._tables.ids.shape[1] - len(owner.pages))
            _require(
                tables[owner.row] == owner.pages + padding,
                f"page table of {seq}: expected {owner.pages} and -1 after them, got "
                f"{tables[owner.row]} (attention reads pages by this table)",
            )
            _require(
                owner.length <= self.capacity(seq),
                f"length of {seq}: expected at most {self.capacity(seq)}, got {owner.length} "
                "(rows without a page)",
            )
        rows = {owner.row for owner in self._owners.values()}
        for row, table in enumerate(tables):
            _require(
                row in rows or set(table) <= {NO_PAGE},
                f"unused page table {row}: expected only -1, got {table} (a released sequence)",
            )
        for page in range(self.shape.num_pages):
            _require(
                owned[page] == 1,
                f"owners of page {page}: expected 1, got {owned[page]} "
                "(0 = leaked, 2 = sequences overwrite each other)",
            )

    def _owner(self, seq: int) -> _Owner:
        owner = self._owners.get(seq)
        if owner is None:
            raise CacheError(
                f"sequence: expected one of {list(self._owners)}, got {seq} (reserve rows first)"
            )
        return owner

    def _flat(self) -> Tensor:
        return self.pages.flatten(1, 2)  # [layers, P * L, D], a view

    def _move(self, seq: int, keep: Sequence[int]) -> None:
        moved = [(node, j) for j, node in enumerate(keep) if node != j]
        if not moved:
            return
        length = self.length(seq)
        sources = self.slots(seq, [length + node for node, _ in moved])
        targets = self.slots(seq, [length + j for _, j in moved])
        flat = self._flat()
        # index_select copies, so every source is read before any target is written.
        flat.index_copy_(1, targets, flat.index_select(1, sources))

    def _poison(self, owner: _Owner, start: int) -> None:
        if self.fill is None:
            return
        page_size = self.shape.page_size
        for number in range(start // page_size, len(owner.pages)):
            first = max(0, start - number * page_size)
            self.pages[:, owner.pages[number], first:] = self.fill


def _as_positions(positions: Tensor | Sequence[int]) -> Tensor:
    if not isinstance(positions, Tensor):
        return torch.tensor(positions, dtype=torch.int64)
    if positions.ndim != 1 or positions.is_floating_point():
        raise ShapeError(
            f"positions: expected [n] integers, got {list(positions.shape)} {positions.dtype} "
            "(row numbers of one sequence)"
        )
    return positions.long()


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise CacheError(message)
