"""Rows of the KV cache: where a position lives, what a commit keeps, what a later prompt reuses.

One `LatentCache` holds the rows of all layers of one model; a page id means the same page in every
layer. Rows `[0, length)` of a sequence are committed; rows from `length` up to the end of its
pages are reserved. A verify pass writes its tree there and a commit keeps the accepted rows; in
the hybrid layout the tree stands in a `TreeScratch` and a commit moves the accepted rows here.

::

    position   0 1 2 3 | 4 5 6 7 | 8 ...      page_size 4, length 6
    page table    5    |    2    | -1         slot = page_id * page_size + position % page_size
    state      C C C C | C C . . |            C committed, . reserved

Who holds which page is the ledger's business; nothing on the way of a write reads the device.
What a row means (latent, or keys beside values) is the model's.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from engine.config import check_page_size
from engine.device import upload
from engine.errors import CacheError, ConfigError, ShapeError
from engine.page_ledger import Holding, PageLedger
from engine.page_pool import PagePool, PageTables
from engine.prefix_index import PrefixIndex
from engine.tree_scratch import (
    ScratchShape,
    TreeScratch,
    fill_value,
    filled,
    kept_nodes,
    store_rows,
)


@dataclass(frozen=True, slots=True)
class CacheShape:
    """The sizes of a cache.

    `row_dim` is D, the width of one row of one layer; `feature_dim` that of the drafter's feature
    of a position, kept beside its rows, 0 where there is none, of a dtype of its own where named.
    """

    num_layers: int
    num_pages: int
    page_size: int
    row_dim: int
    feature_dim: int = 0
    feature_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        check_page_size(self.page_size)
        least = {"num_layers": 1, "num_pages": 1, "row_dim": 1, "feature_dim": 0}
        for name, bound in least.items():
            if getattr(self, name) < bound:
                raise ConfigError(
                    f"{name}: expected at least {bound}, got {getattr(self, name)} "
                    "(a size of the cache)"
                )


class LatentCache:
    """KV rows of all layers in pages of one of `PAGE_SIZES`.

    Parameters
    ----------
    shape : CacheShape
    dtype, device
        Of the rows, and of features that say no other. The page tables live on the same device.
    fill : float, optional
        If given, every row that is not committed holds this value until it is written, also after
        its page was used before. NaN makes a read of such a row visible. If None, storage starts
        as zeros and is never cleared; such rows must not matter.
    page_order : sequence of int, optional
        The order in which pages are handed out at first; a permutation of all page ids.
    reuse_prefixes : bool
        Whether `publish` keeps pages for later sequences that `begin` with the same tokens.
    """

    def __init__(
        self,
        shape: CacheShape,
        *,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        fill: float | None = None,
        page_order: Sequence[int] | None = None,
        reuse_prefixes: bool = False,
    ) -> None:
        self.shape, self.fill = shape, fill
        pages = (shape.num_pages, shape.page_size)
        self.pages = filled((shape.num_layers, *pages, shape.row_dim), fill, dtype, device)
        features = (*pages, shape.feature_dim)  # [P, L, feature_dim]
        self.features = filled(features, fill, shape.feature_dtype or dtype, device)
        self._ledger = PageLedger(
            PagePool(shape.num_pages, page_order),
            PageTables(self.pages.device),
            shape.page_size,
            PrefixIndex(shape.page_size) if reuse_prefixes else None,
        )

    @property
    def num_free_pages(self) -> int:
        """Pages that neither a sequence nor the index of prefixes holds."""
        return self._ledger.pool.num_free

    @property
    def num_indexed_pages(self) -> int:
        """Pages that are kept for later sequences, whether one holds them now or not."""
        return 0 if self._ledger.index is None else len(self._ledger.index)

    @property
    def sequences(self) -> tuple[int, ...]:
        """The sequences that hold a row of the tables, in the order they came."""
        return tuple(self._ledger.holdings)

    def layer(self, layer: int) -> Tensor:
        """Return the pages of one layer, `[P, L, D]`: a view, mutated by later writes."""
        return self.pages[layer]

    def length(self, seq: int) -> int:
        """Return the committed rows of `seq`."""
        return self._ledger.holding(seq).length

    def capacity(self, seq: int) -> int:
        """Return the rows, committed and reserved, that the pages of `seq` can hold."""
        return self._ledger.capacity(self._ledger.holding(seq))

    def begin(self, seq: int, token_ids: Sequence[int]) -> int:
        """Begin a sequence with the pages that earlier ones published under the same tokens.

        The longest run of whole pages that hold the beginning of `token_ids` is shared, with the
        features beside its rows. Hand over the tokens whose rows will be wanted and no others:
        all of them may be found. Returns the committed rows the sequence starts with, 0 without
        reuse of prefixes. A sequence that has begun already is a CacheError.
        """
        return self._ledger.begin(seq, token_ids).length

    def publish(self, seq: int, token_ids: Sequence[int]) -> None:
        """Keep whole committed pages of `seq` for later sequences; nothing happens without reuse.

        Token i is that of row i. Only pages that end below both the committed rows and the tokens
        given are kept, so rows whose token was dropped are never handed on. Features of these rows
        must have been written. A published page stays when its sequence is released, until pages
        run short and it is the least recently used. Linear in the number of tokens.
        """
        self._ledger.publish(seq, token_ids)

    def clear_prefixes(self) -> None:
        """Keep no page for later sequences any more."""
        ledger = self._ledger
        if ledger.index is not None:
            ledger.pool.drop(ledger.index.clear())

    def grow(self, num_pages: int) -> None:
        """Enlarge the pool to `num_pages` pages in all; contents are kept.

        `pages` and `features` become other tensors; views handed out before show the old ones.

        Raises
        ------
        CacheError
            There are more pages already.
        """
        if num_pages < self.shape.num_pages:
            raise CacheError(
                f"num_pages: expected at least {self.shape.num_pages}, got {num_pages} "
                "(a pool only grows)"
            )
        pages = self._grown(self.pages, 1, num_pages)
        self.pages, self.features = pages, self._grown(self.features, 0, num_pages)
        self.shape = replace(self.shape, num_pages=num_pages)
        self._ledger.pool.grow(num_pages)

    def new_scratch(self, num_seqs: int, max_rows: int) -> TreeScratch:
        """Return room for `num_seqs` trees of up to `max_rows` rows that will be moved here."""
        shape = ScratchShape(self.shape.num_layers, num_seqs, max_rows, self.shape.row_dim)
        return TreeScratch(shape, dtype=self.pages.dtype, device=self.pages.device, fill=self.fill)

    def reserve(self, seq: int, num_rows: int) -> None:
        """Make sure that `num_rows` rows after the committed ones have pages.

        A sequence that has not begun begins empty. Pages already held are used first, then free
        ones, then those that only the index of prefixes holds.

        Raises
        ------
        OutOfPagesError
            Too few pages can be had; the cache is as it was.
        CacheError
            `num_rows` is negative.
        """
        if num_rows < 0:
            raise CacheError(f"num_rows: expected at least 0, got {num_rows} (rows to reserve)")
        self._poison_pages(self._ledger.reserve(seq, num_rows))

    def page_table(self, seqs: Sequence[int], *, max_pages: int | None = None) -> Tensor:
        """Return a copy of the page tables of `seqs`, as wide as the longest if None, at least 1.

        `[N, max_pages] int32`, contiguous, on the cache's device; -1 after the last page. A
        sequence that is unknown or holds more than `max_pages` pages is a CacheError.
        """
        return self._ledger.table(seqs, max_pages)

    def slots(self, seq: int, positions: Tensor | Sequence[int]) -> Tensor:
        """Return where `positions` of `seq` live.

        Positions on the host are checked, a few of them fastest as a range or list. A CUDA tensor
        is trusted, a check would be a sync.

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
        return upload(self._ledger.slots(seq, positions), self.pages.device)

    def slots_behind(self, seq: int, num_rows: int) -> list[int]:
        """Return where the first `num_rows` reserved rows live, known without a tensor."""
        holding = self._ledger.with_room(seq, num_rows)
        return self._ledger.slots_behind(holding, range(num_rows))

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
        store_rows(self.pages[layer], slots, rows)

    def write_features(self, slots: Tensor, rows: Tensor) -> None:
        """Store the drafter's features [n, feature_dim] of the positions at `slots`, as `write`."""
        store_rows(self.features, slots, rows)

    def gather(self, layer: int, seq: int) -> Tensor:
        """Return a copy of the committed rows of `seq` in one layer, `[length, D]` in order."""
        slots = self.slots(seq, torch.arange(self.length(seq)))
        return self._flat()[layer].index_select(0, slots)

    def gather_features(self, seq: int, start: int, end: int) -> Tensor:
        """Return a copy of the features of committed positions `[start, end)`, in order."""
        if not 0 <= start <= end <= self.length(seq):
            raise CacheError(
                f"start, end: expected ascending in 0..{self.length(seq)}, got {start} and {end} "
                f"(committed rows of sequence {seq})"
            )
        return self.features.flatten(0, 1)[self.slots(seq, torch.arange(start, end))]

    def advance(self, seq: int, num_rows: int) -> None:
        """Commit the first `num_rows` reserved rows as they lie, as after a prefill chunk."""
        holding = self._ledger.with_room(seq, num_rows)
        holding.length += num_rows
        self._poison(holding)

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
        kept = kept_nodes(path)
        holding = self._ledger.with_room(seq, kept[-1] + 1)
        moved = [(node, j) for j, node in enumerate(kept) if node != j]
        if moved:
            old, new = zip(*moved, strict=True)
            behind = self._ledger.slots_behind
            sources, targets = self._upload(behind(holding, old), behind(holding, new))
            flat = self._flat()
            # index_select copies, so every source is read before any target is written.
            flat.index_copy_(1, targets, flat.index_select(1, sources))
        holding.length += len(kept)
        self._poison(holding)
        return holding.length

    def commit_scratch(
        self, scratch: TreeScratch, index: int, seq: int, path: Tensor | Sequence[int]
    ) -> int:
        """Keep the root and the accepted path of tree `index` of a scratch (both mutated).

        Node 0 moves to position `length`, node `path[j]` to `length + 1 + j`, in every layer; so
        `1 + num_accepted` rows must be reserved. The scratch's rows of this tree hold its fill
        afterwards. Path, result and a refused path are as in `commit`.

        Raises
        ------
        ShapeError
            The scratch is of another cache.
        """
        kept = kept_nodes(path)
        holding = self._ledger.with_room(seq, len(kept))
        rows, pages = scratch.rows[:, 0, 0], self.pages[:, 0, 0]  # [layers, D]
        if rows.shape != pages.shape or rows.dtype != pages.dtype:
            raise ShapeError(
                f"scratch: expected {list(pages.shape)} layers and width of {pages.dtype}, got "
                f"{list(rows.shape)} of {rows.dtype} (make it with `new_scratch`)"
            )
        sources, targets = self._upload(
            scratch.slots(index, kept), self._ledger.slots_behind(holding, range(len(kept)))
        )
        self._flat().index_copy_(1, targets, scratch.gather(sources))
        scratch.clear(index)
        holding.length += len(kept)
        return holding.length

    def truncate(self, seq: int, length: int) -> None:
        """Go back to `length` committed rows and drop the pages no longer needed.

        A page that others hold too is copied where rows of it will be written again.

        Raises
        ------
        CacheError
            There are fewer committed rows.
        OutOfPagesError
            No page can be had for the copy; the cache is as it was.
        """
        copied = self._ledger.truncate(seq, length)
        if copied is not None:
            source, target = copied
            self.pages[:, target] = self.pages[:, source]
            self.features[target] = self.features[source]
        self._poison(self._ledger.holding(seq))

    def release(self, seq: int) -> None:
        """Forget `seq` and drop all its pages; those that nobody else holds are free."""
        self._ledger.release(seq)

    def check_integrity(self) -> None:
        """Refuse a cache whose pages and tables disagree; reads the tables back to the host.

        A CacheError says that a page has more or fewer holders than the pool counts, a table
        differs from the pages its sequence holds, rows have no page or could be written into
        another's page, or the index of prefixes is torn.
        """
        self._ledger.check()

    def _flat(self) -> Tensor:
        return self.pages.flatten(1, 2)  # [layers, P * L, D], a view

    def _upload(self, *rows: Sequence[int]) -> Tensor:
        return upload(torch.tensor(rows), self.pages.device)

    def _grown(self, held: Tensor, dim: int, num_pages: int) -> Tensor:
        sizes = (*held.shape[:dim], num_pages, *held.shape[dim + 1 :])
        grown = filled(sizes, self.fill, held.dtype, held.device)
        grown.narrow(dim, 0, held.shape[dim]).copy_(held)
        return grown

    def _poison(self, holding: Holding) -> None:
        """Let all rows behind the committed ones hold the fill, if there is one."""
        if self.fill is None:
            return
        number, offset = divmod(holding.length, self.shape.page_size)
        if offset:
            self.pages[:, holding.pages[number], offset:] = fill_value(self.fill, self.pages.dtype)
            self.features[holding.pages[number], offset:] = self.fill
        self._poison_pages(holding.pages[number + bool(offset) :])

    def _poison_pages(self, pages: Sequence[int]) -> None:
        if self.fill is None or not pages:
            return
        (ids,) = self._upload(pages)
        self.pages.index_fill_(1, ids, fill_value(self.fill, self.pages.dtype))
        self.features.index_fill_(0, ids, self.fill)
