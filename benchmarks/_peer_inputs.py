"""The operands of a cell, as engines hand them to their kernels, and what must come out.

The op's own test inputs are hostile on purpose: rows of nobody are NaN, page ids beyond a length
are impossible. No stock kernel promises to survive that, and a fault of one would end the process
for all, so here such rows are zeros and such ids page 0.

Queries and rows are standard normal, but for the trees' rows, which are larger: among 64k rows of
one size a few more or less hardly move the result, and a wrong mask must show at any context.
"""

from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor

from benchmarks._peer_cells import PeerCell
from engine.kernels import OPS, Cost, TreeAttentionCase

OP: Final = OPS["tree_attention"]
VALUE_DIM: Final = 512
ROPE_DIM: Final = 64
TREE_GAIN: Final = 4.0  # scores of tree rows spread over e±4 times those of committed ones


@dataclass(frozen=True, slots=True)
class PeerInputs:
    """One cell's operands on its device. Tree rows lie in the pages, behind the committed ones."""

    cell: PeerCell
    case: TreeAttentionCase
    arguments: dict[str, Any]  # of the op, without a backend

    @property
    def q(self) -> Tensor:
        """Queries `[N, T, H, D]`."""
        q: Tensor = self.arguments["q"]
        return q

    @property
    def kv_pages(self) -> Tensor:
        """All pages `[P, L, D]`, contiguous."""
        pages: Tensor = self.arguments["kv_pages"]
        return pages

    @property
    def page_table(self) -> Tensor:
        """Page ids `[N, max_pages]` int32."""
        table: Tensor = self.arguments["page_table"]
        return table

    @property
    def context_lens(self) -> Tensor:
        """Committed rows `[N]` int32."""
        lengths: Tensor = self.arguments["context_lens"]
        return lengths

    @property
    def lengths(self) -> Tensor:
        """Committed and tree rows `[N]` int32."""
        return self.context_lens + self.cell.tree_tokens

    @property
    def scale(self) -> float:
        """Factor of the scores."""
        return float(self.arguments["softmax_scale"])

    @property
    def flat_q(self) -> Tensor:
        """Queries of all sequences, one after the other: `[N * T, H, D]`."""
        return self.q.flatten(0, 1)

    @property
    def slots(self) -> Tensor:
        """Row numbers in the pool `[N, longest]` int32, in order of position; 0 beyond a length."""
        page_size = self.cell.page_size
        position = torch.arange(int(self.lengths.max()), device=self.q.device)
        pages = self.page_table.long()[:, position // page_size]
        slots = pages * page_size + position % page_size
        return slots.masked_fill(position >= self.lengths[:, None], 0).to(torch.int32)

    @property
    def tree_slots(self) -> Tensor:
        """Row numbers of the trees `[N, T]` int32, in order of node."""
        node = torch.arange(self.cell.tree_tokens, device=self.q.device)
        return self.slots.gather(1, self.context_lens.long()[:, None] + node)

    @property
    def visible(self) -> Tensor:
        """Ancestor masks `[N, T, T]` bool: row i sees column j."""
        masks = [ancestor_mask(tree) for tree in self.case.trees]
        return torch.stack(masks).to(self.q.device)

    def masked(self, mask: str) -> TreeAttentionCase:
        """Return the case under the mask "tree" or "chain"; the rest of it stays."""
        chain = tuple(range(-1, self.cell.tree_tokens - 1))
        trees = self.case.trees if mask == "tree" else (chain,) * self.cell.num_seqs
        return replace(self.case, trees=trees)

    def cost(self, mask: str) -> Cost:
        """Bytes that must move and arithmetic that must happen under a mask."""
        return OP.cost(self.masked(mask), itemsize=self.q.dtype.itemsize)

    def expected(self, mask: str) -> Tensor:
        """Result by the op's definition, summed and returned in float32: `[N, T, H, value_dim]`."""
        words = [pack_bits(ancestor_mask(tree)) for tree in self.masked(mask).trees]
        exact = {name: self.arguments[name].float() for name in ("q", "kv_pages")}
        exact["ancestor_bits"] = torch.stack(words).to(self.q.device)
        out: Tensor = OP.reference(**(self.arguments | exact))[0]
        return out


def build_inputs(
    cell: PeerCell,
    *,
    device: str,
    dtype: torch.dtype,
    value_dim: int = VALUE_DIM,
    rope_dim: int = ROPE_DIM,
) -> PeerInputs:
    """Build a cell's operands, the same for the same cell; each sequence has a tree of its own."""
    case = TreeAttentionCase(
        name=cell.label,
        reason="one layer of a verify pass, side by side with stock kernels",
        context_lens=cell.context_lens,
        trees=tuple(random_tree(cell.tree_tokens, seed) for seed in range(cell.num_seqs)),
        num_heads=cell.num_heads,
        value_dim=value_dim,
        rope_dim=rope_dim,
        page_size=cell.page_size,
    )
    arguments = OP.inputs(case, device=device, dtype=dtype)
    arguments["kv_pages"].nan_to_num_(nan=0.0)
    used = -(-(arguments["context_lens"] + cell.tree_tokens) // cell.page_size)
    column = torch.arange(arguments["page_table"].shape[1], device=device)
    arguments["page_table"].masked_fill_(column >= used[:, None], 0)
    inputs = PeerInputs(cell, case, arguments)
    inputs.kv_pages.flatten(0, 1)[inputs.tree_slots.long()] *= TREE_GAIN
    return _in_order(inputs, used) if cell.page_order == "in_order" else inputs


def _in_order(inputs: PeerInputs, used: Tensor) -> PeerInputs:
    """Move the pages so that each sequence's follow each other."""
    column = torch.arange(inputs.page_table.shape[1], device=used.device)
    held = column < used[:, None]  # [N, max_pages]
    pages = inputs.kv_pages[inputs.page_table[held].long()]
    first = used.cumsum(0) - used
    table = (first[:, None] + column).masked_fill(~held, 0).to(torch.int32)
    return replace(inputs, arguments=inputs.arguments | {"kv_pages": pages, "page_table": table})


def random_tree(size: int, seed: int) -> tuple[int, ...]:
    """Parents of a random tree, -1 at the root: each node hangs on any of those before it."""
    generator = torch.Generator().manual_seed(seed)
    parents = [int(torch.randint(0, node, (), generator=generator)) for node in range(1, size)]
    return (-1, *parents)


def ancestor_mask(parents: tuple[int, ...]) -> Tensor:
    """Ancestor mask `[T, T]` bool of a tree; every node sees itself."""
    visible = torch.eye(len(parents), dtype=torch.bool)
    for node, parent in enumerate(parents):
        if parent >= 0:
            visible[node] |= visible[parent]
    return visible


def pack_bits(visible: Tensor) -> Tensor:
    """Pack a mask `[T, T]` bool into words `[T, W]` int32, bit j % 32 of word j // 32."""
    num_words = -(-visible.shape[1] // 32)
    bits = torch.zeros(len(visible), 32 * num_words, dtype=torch.int64)
    bits[:, : visible.shape[1]] = visible
    weights = 1 << torch.arange(32)
    return (bits.view(len(visible), num_words, 32) * weights).sum(2).to(torch.int32)
