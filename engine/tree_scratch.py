"""Rows of draft trees apart from the pages: dense, one place for each node of each sequence.

In the hybrid layout pages hold committed rows only. A verify pass writes its trees here, attention
reads them as `tree_kv`, and a commit moves the accepted rows into pages, so that pages can be as
large as the kernels like without a tree ever reserving room in them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.errors import CacheError, ConfigError, ShapeError


@dataclass(frozen=True, slots=True)
class ScratchShape:
    """Sizes of a scratch: `max_rows` is the largest tree, root included; `row_dim` is D."""

    num_layers: int
    num_seqs: int
    max_rows: int
    row_dim: int

    def __post_init__(self) -> None:
        for name in ("num_layers", "num_seqs", "max_rows", "row_dim"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"{name}: expected at least 1, got {getattr(self, name)} (a size of a scratch)"
                )


class TreeScratch:
    """Tree rows of all layers, `[layers, N, T, D]`.

    Parameters
    ----------
    shape : ScratchShape
    dtype, device
        Of the rows; those of the cache they will be moved to.
    fill : float, optional
        If given, rows hold this value until they are written and again after their tree was
        committed. NaN makes a read of such a row visible. If None, rows begin as zeros.
    """

    def __init__(
        self,
        shape: ScratchShape,
        *,
        dtype: torch.dtype,
        device: torch.device | str,
        fill: float | None = None,
    ) -> None:
        self.shape = shape
        self.fill = fill
        sizes = (shape.num_layers, shape.num_seqs, shape.max_rows, shape.row_dim)
        self.rows = filled(sizes, fill, dtype, device)

    def layer(self, layer: int, num_seqs: int, num_rows: int) -> Tensor:
        """Return the first rows of the first trees of one layer.

        Returns
        -------
        Tensor
            `[num_seqs, num_rows, D]`, a view, last dim contiguous, mutated by later writes.

        Raises
        ------
        CacheError
            There are fewer trees or rows.
        """
        shape = self.shape
        if not (0 <= num_seqs <= shape.num_seqs and 0 <= num_rows <= shape.max_rows):
            raise CacheError(
                f"trees, rows: expected at most {shape.num_seqs} and {shape.max_rows}, got "
                f"{num_seqs} and {num_rows} (room of the scratch)"
            )
        return self.rows[layer, :num_seqs, :num_rows]

    def write(self, layer: int, slots: Tensor, rows: Tensor) -> None:
        """Store `rows` of one layer, without a host sync.

        Parameters
        ----------
        layer : int
        slots : [n] int64, the scratch's device
            `n * max_rows + i` for node i of tree n; distinct, trusted.
        rows : [n, D], the scratch's dtype and device

        Raises
        ------
        ShapeError
            Shapes or the dtype do not fit.
        """
        store_rows(self.rows[layer], slots, rows)

    def slots(self, index: int, nodes: Sequence[int]) -> list[int]:
        """Return where nodes of tree `index` stand.

        Raises
        ------
        CacheError
            There is no such tree, or a node lies beyond its rows.
        """
        shape = self.shape
        if not 0 <= index < shape.num_seqs or max(nodes) >= shape.max_rows:
            raise CacheError(
                f"tree, node: expected below {shape.num_seqs} and {shape.max_rows}, got {index} "
                f"and {max(nodes)} (room of the scratch)"
            )
        return [index * shape.max_rows + node for node in nodes]

    def gather(self, slots: Tensor) -> Tensor:
        """Return a copy of the rows at `slots` in every layer, `[layers, n, D]`."""
        return self._flat().index_select(1, slots)

    def clear(self, index: int) -> None:
        """Let the rows of one tree hold `fill` again; without a fill they stay as they are."""
        if self.fill is not None:
            self.rows[:, index] = fill_value(self.fill, self.rows.dtype)

    def _flat(self) -> Tensor:
        return self.rows.flatten(1, 2)  # [layers, N * T, D], a view


def fill_value(fill: float | None, dtype: torch.dtype) -> float:
    """Return what storage of a dtype holds where nothing was written.

    Bytes, which are rows in fp8, hold 255 for any fill: NaN as value, as scale and as rotated dim.
    """
    if fill is None:
        return 0
    return 255 if dtype == torch.uint8 else fill


def filled(
    sizes: Sequence[int], fill: float | None, dtype: torch.dtype, device: torch.device | str
) -> Tensor:
    """Return storage in which nothing was written."""
    return torch.full(tuple(sizes), fill_value(fill, dtype), dtype=dtype, device=device)


def kept_nodes(path: Tensor | Sequence[int]) -> list[int]:
    """Return the nodes a commit keeps, the root and an accepted path; refuse one that turns back.

    A CUDA tensor is read back to the host.
    """
    accepted = path.tolist() if isinstance(path, Tensor) else list(path)
    kept = [0, *accepted]
    if any(node >= after for node, after in zip(kept, accepted, strict=False)):
        raise CacheError(
            f"path: expected ascending nodes from 1 on, got {accepted} (a child has a greater id "
            "than its parent; the root is kept anyway)"
        )
    return kept


def store_rows(storage: Tensor, slots: Tensor, rows: Tensor) -> None:
    """Copy `rows` [n, D] into `storage` [groups, group rows, D] (mutated) at `slots` [n].

    A `ShapeError` refuses rows that are not one for each slot, of the storage's width and dtype.
    """
    expected = (*slots.shape, storage.shape[-1])
    if slots.ndim != 1 or rows.shape != expected or rows.dtype != storage.dtype:
        raise ShapeError(
            f"rows: expected [n] slots and [n, {storage.shape[-1]}] {storage.dtype}, got "
            f"{list(slots.shape)} and {list(rows.shape)} {rows.dtype} (nothing is cast)"
        )
    storage.flatten(0, 1).index_copy_(0, slots, rows)
