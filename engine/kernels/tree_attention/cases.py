"""What tree attention is tested and measured on: cases, their seeded inputs, cost, tolerance."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from engine.config import PAGE_SIZES
from engine.kernels.op import Case, Cost, Tolerance
from engine.kernels.tree_attention.fp8_rows import (
    GROUP_DIMS,
    fp8_row_bytes,
    num_groups,
    quantize_rows,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

_SPARE_PAGES = 3  # pages that belong to no sequence; their rows are NaN
_IMPOSSIBLE_PAGE = 2**31 - 1  # page id beyond every pool, for table entries nobody may read
_INT_BYTES = 4  # of an id, a length, a mask word; of an lse too


@dataclass(frozen=True, slots=True)
class TreeAttentionCase(Case):
    """Sizes of one call; `trees` holds the parents of each sequence's tree, -1 at the root."""

    context_lens: tuple[int, ...]
    trees: tuple[tuple[int, ...], ...]
    num_heads: int = 2
    value_dim: int = 16
    rope_dim: int = 16
    page_size: int = 1
    hybrid: bool = False  # the tree's rows stand in tree_kv, not in the pages
    row_gap: int = 0  # elements behind every row of q, pages, table, mask and tree_kv: views
    sees: str = "ancestors"  # or "random": any mask, rows that see nothing among them
    query_scale: float = 1.0  # scores have about this size
    shared_pages: int = 0  # first pages of every sequence that are those of the first one
    seed: int = 0
    is_fp8: bool = False  # cached rows are bytes, as fp8_rows says

    @property
    def tree_sizes(self) -> tuple[int, ...]:
        """Tree tokens of each sequence, T of the longest."""
        return tuple(len(tree) for tree in self.trees)

    @property
    def latent_dim(self) -> int:
        """Width of a cached row, D."""
        return self.value_dim + self.rope_dim

    def row_bytes(self, itemsize: int) -> int:
        """Bytes of a cached row where a number of a plain one takes `itemsize`."""
        if self.is_fp8:
            return fp8_row_bytes(self.value_dim, self.rope_dim)
        return self.latent_dim * itemsize


def chain(size: int) -> tuple[int, ...]:
    """Parents of a tree in which every token follows the one before."""
    return tuple(range(-1, size - 1))


def star(size: int) -> tuple[int, ...]:
    """Parents of a tree in which every token is a child of the root."""
    return (-1, *([0] * (size - 1)))


def bush(size: int, seed: int) -> tuple[int, ...]:
    """Parents of a random tree, seeded."""
    generator = torch.Generator().manual_seed(seed)
    parents = [int(torch.randint(0, node, (), generator=generator)) for node in range(1, size)]
    return (-1, *parents)


def pack_ancestors(parents: Sequence[int], num_words: int) -> Tensor:
    """Ancestor words `[T, num_words]` int32 of a tree: bit j of row i iff j is i or above it."""
    seen: list[int] = []
    for node, parent in enumerate(parents):
        seen.append((seen[parent] if parent >= 0 else 0) | 1 << node)
    words = [[(row >> 32 * word) & 0xFFFFFFFF for word in range(num_words)] for row in seen]
    return torch.tensor(words, dtype=torch.int64).to(torch.int32)


def inputs(
    case: TreeAttentionCase,
    *,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    """Build the arguments of `tree_attention`, without the backend, from the case's seed.

    What must not matter is made to hurt: rows of no sequence, padding queries and padding tree
    rows are NaN, table entries beyond a length are -1 or no page at all, and mask bits of padding
    tokens are set. `torch.randn` on `device` under the seed gives the rest.
    """
    generator = torch.Generator(device).manual_seed(case.seed)
    N, T, D = len(case.context_lens), max(case.tree_sizes), case.latent_dim

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch.float32).to(dtype)

    def rows(*shape: int) -> Tensor:
        drawn = normal(*shape, D)
        if not case.is_fp8:
            return drawn
        # Scales of all sizes: one taken for another is found.
        steps = torch.randint(-2, 2, (*shape, num_groups(case.value_dim)), generator=generator,
                              device=device)  # fmt: skip
        factors = torch.exp2(steps.repeat_interleave(GROUP_DIMS, dim=-1)[..., : case.value_dim])
        drawn[..., : case.value_dim] *= factors.to(dtype)
        return quantize_rows(drawn, case.value_dim)

    nothing = _no_row(case, device, dtype)
    q = normal(N, T, case.num_heads, D) * case.query_scale
    tree_kv = rows(N, T) if case.hybrid else None
    for sequence, size in enumerate(case.tree_sizes):
        q[sequence, size:] = torch.nan
        if tree_kv is not None:
            tree_kv[sequence, size:] = nothing
    page_table, num_pages = _page_table(case)
    flat = nothing.repeat(num_pages * case.page_size, 1)
    for sequence, length in enumerate(_paged_lengths(case)):
        slots = _slots(page_table[sequence], length, case.page_size).to(device)
        flat[slots] = rows(length)
    kv_pages = flat.view(num_pages, case.page_size, -1)
    operands = {
        "q": q,
        "kv_pages": kv_pages,
        "page_table": page_table.to(device),
        "context_lens": torch.tensor(case.context_lens, dtype=torch.int32, device=device),
        "ancestor_bits": _ancestor_bits(case, T).to(device),
        "tree_sizes": torch.tensor(case.tree_sizes, dtype=torch.int32, device=device),
        "tree_kv": tree_kv,
    }
    if case.row_gap:
        strided = ("q", "kv_pages", "page_table", "ancestor_bits", "tree_kv")
        operands |= {name: _inside_larger(operands[name], case.row_gap) for name in strided}
    return {**operands, "softmax_scale": D**-0.5, "value_dim": case.value_dim}


def _no_row(case: TreeAttentionCase, device: str | torch.device, dtype: torch.dtype) -> Tensor:
    """Return what a row holds that nobody may read: NaN, in bytes under scales of infinity."""
    row = torch.full((case.latent_dim,), torch.nan, dtype=dtype)
    if case.is_fp8:
        row = quantize_rows(row, case.value_dim)
        row[1 : case.value_dim : 2] ^= 0x80  # the format's other NaN
        first = case.value_dim
        scales = torch.full((num_groups(case.value_dim),), torch.inf).view(torch.uint8)
        row[first : first + len(scales)] = scales
    return row.to(device)


def _paged_lengths(case: TreeAttentionCase) -> list[int]:
    """Rows each sequence holds in the pages."""
    tree_sizes = [0] * len(case.trees) if case.hybrid else case.tree_sizes
    return [context + tree for context, tree in zip(case.context_lens, tree_sizes, strict=True)]


def _page_table(case: TreeAttentionCase) -> tuple[Tensor, int]:
    """Shuffled page ids `[N, max_pages]` int32, and the size of the pool they come from."""
    generator = torch.Generator().manual_seed(case.seed)
    counts = [-(-length // case.page_size) for length in _paged_lengths(case)]
    num_pages = sum(counts) - case.shared_pages * (len(counts) - 1) + _SPARE_PAGES
    ids = torch.randperm(num_pages, generator=generator, dtype=torch.int64).to(torch.int32)
    table = torch.full((len(counts), max(counts) + 2), _IMPOSSIBLE_PAGE, dtype=torch.int32)
    table[:, 1::2] = -1
    table[:, : case.shared_pages] = ids[: case.shared_pages]
    used = case.shared_pages
    for sequence, count in enumerate(counts):
        own = count - case.shared_pages
        table[sequence, case.shared_pages : count] = ids[used : used + own]
        used += own
    return table, num_pages


def _slots(page_ids: Tensor, length: int, page_size: int) -> Tensor:
    """Slots of positions 0..length of one sequence."""
    positions = torch.arange(length)
    return page_ids.long()[positions // page_size] * page_size + positions % page_size


def _ancestor_bits(case: TreeAttentionCase, T: int) -> Tensor:
    """Words of every tree `[N, T, W]`; padding tokens, as rows and as columns, have every bit."""
    num_words = -(-T // 32)
    generator = torch.Generator().manual_seed(case.seed)
    bits = torch.full((len(case.trees), T, num_words), -1, dtype=torch.int32)
    for sequence, tree in enumerate(case.trees):
        words = pack_ancestors(tree, num_words)
        if case.sees == "random":
            shape = words.shape
            words = torch.randint(-(2**31), 2**31, shape, generator=generator).to(torch.int32)
            words[len(tree) // 2] = 0  # a token that sees no tree row, not even its own
        unused = pack_ancestors(chain(32 * num_words), num_words)[-1]
        unused = unused ^ pack_ancestors(chain(len(tree)), num_words)[-1]
        bits[sequence, : len(tree)] = words | unused
    return bits


def _inside_larger(tensor: Tensor | None, gap: int) -> Tensor | None:
    """Return the same values as a view with a gap behind every row; the gap is not a value."""
    if tensor is None:
        return None
    *leading, last = tensor.shape
    hole = torch.nan if tensor.is_floating_point() else 0xFF if tensor.dtype == torch.uint8 else -1
    larger = torch.full((*leading, last + gap), hole, dtype=tensor.dtype, device=tensor.device)
    larger[..., :last] = tensor
    return larger[..., :last]


def cost(case: TreeAttentionCase, *, itemsize: int = 2) -> Cost:
    """Bytes and FLOP of a call: each latent row, query, result, id, length and mask word once.

    A row that several sequences share is one row. FLOP counts the visible pairs of trees only:
    2 (D + value_dim) for each of them and each head.
    """
    again = case.shared_pages * case.page_size * (len(case.trees) - 1)
    kv_rows = sum(case.context_lens) + sum(case.tree_sizes) - again
    tokens = sum(case.tree_sizes)
    kv_bytes = kv_rows * case.row_bytes(itemsize)
    row_bytes = (case.latent_dim + case.value_dim) * itemsize + _INT_BYTES  # query, out, lse
    page_ids = sum(-(-length // case.page_size) for length in _paged_lengths(case))
    mask_words = sum(size * -(-size // 32) for size in case.tree_sizes)
    ints = page_ids + mask_words + 2 * len(case.trees)  # and both lengths of every sequence
    pairs = sum(
        context * len(tree) + _num_visible(tree)
        for context, tree in zip(case.context_lens, case.trees, strict=True)
    )
    return Cost(
        bytes=kv_bytes + tokens * case.num_heads * row_bytes + ints * _INT_BYTES,
        flops=2 * pairs * case.num_heads * (case.latent_dim + case.value_dim),
        kv_bytes=kv_bytes,
    )


def _num_visible(tree: Sequence[int]) -> int:
    """Ancestor pairs of a tree, every token its own ancestor: the sum of depth + 1."""
    levels: list[int] = []
    for parent in tree:
        levels.append(levels[parent] + 1 if parent >= 0 else 1)
    return sum(levels)


def tolerance(dtype: torch.dtype, query_scale: float = 1.0) -> Tolerance:
    """How far an implementation may be from the reference on the same inputs.

    `query_scale` is the case's: an error of a score is relative to the score, and its effect on a
    probability, and on the lse, is the error itself.
    """
    scale = max(1.0, query_scale)
    if dtype == torch.float32:
        return Tolerance(
            1e-5 * scale, 1e-4 * scale**0.5, "float32 sums of up to 1e5 terms in another order"
        )
    if dtype == torch.float64:
        return Tolerance(
            1e-12 * scale, 1e-11 * scale**0.5, "float64 sums of up to 1e5 terms in another order"
        )
    return Tolerance(
        2e-2 if dtype == torch.bfloat16 else 3e-3,
        1e-3 * scale**0.5,
        "probabilities and outputs rounded to the inputs' dtype, scores exact in float32",
    )


def _edges(page_size: int, edge: int, *, hybrid: bool = False) -> TreeAttentionCase:
    """Contexts around an edge and none at all, as one batch; trees in pages cross the same edge."""
    return TreeAttentionCase(
        name=f"{'hybrid-' if hybrid else ''}edge{edge}-page{page_size}",
        reason=f"lengths around {edge}: off-by-one at pages, tiles and splits",
        context_lens=(edge - 1, edge, edge + 1, 0),
        trees=(bush(5, seed=1), chain(4), star(6), bush(7, seed=2)),
        num_heads=2 if page_size == 16 else 1,
        page_size=page_size,
        hybrid=hybrid,
        seed=edge,
    )


CASES: tuple[TreeAttentionCase, ...] = (
    TreeAttentionCase("root-only", "smallest legal call: one token, no context", (0,), ((-1,),)),
    TreeAttentionCase("root-page64", "one token after one row of a page", (1,), ((-1,),),
                      page_size=64),
    TreeAttentionCase("empty-context", "the tree is all there is", (0, 0), (chain(7), star(5)),
                      page_size=16),
    _edges(1, 32), _edges(16, 16), _edges(16, 64), _edges(32, 96),
    _edges(64, 64), _edges(64, 128), _edges(128, 128),
    _edges(64, 64, hybrid=True), _edges(128, 128, hybrid=True),
    TreeAttentionCase("hybrid-word-edge", "tree tiles beside the pages, over a mask word",
                      (64, 129, 0), (bush(33, 14), chain(3), bush(32, 15)), page_size=128,
                      num_heads=1, hybrid=True),
    TreeAttentionCase("uneven", "a long, a short and an empty sequence share a launch",
                      (131, 2, 0, 40), (bush(11, 2), (-1,), chain(3), star(17)), page_size=16,
                      num_heads=3),
    # Source: rmagur1203/vllm-ddtree tests/ddtree/t1_treemask.py, lengths and tree sizes.
    TreeAttentionCase("three-requests", "trees behind three unequal prefixes, none a page long",
                      (40, 23, 7), (bush(9, 16), bush(13, 17), bush(5, 18)), page_size=16),
    TreeAttentionCase("long", "more tiles, and so more splits, than one step of the merge takes",
                      (600,), (bush(16, 13),), num_heads=1, page_size=16),
    TreeAttentionCase("word-edge", "trees that cross the first mask word", (19, 5, 33),
                      (bush(31, 3), bush(32, 4), bush(33, 5)), page_size=16),
    TreeAttentionCase("two-words", "trees that cross the second mask word", (3, 70),
                      (bush(64, 6), bush(65, 7)), page_size=64, num_heads=1),
    TreeAttentionCase("any-mask", "masks that are no tree, rows that see nothing", (0, 37),
                      (chain(40), chain(9)), page_size=1, sees="random"),
    TreeAttentionCase("hybrid", "tree rows beside the pages, not in them", (45, 0, 64),
                      (bush(9, 8), chain(5), star(3)), page_size=16, hybrid=True),
    TreeAttentionCase("strided", "views of larger tensors, gaps filled with NaN", (50, 17),
                      (bush(6, 9), chain(9)), page_size=16, row_gap=16),
    TreeAttentionCase("unaligned", "views whose rows begin at any element", (50, 17),
                      (bush(6, 9), chain(9)), page_size=16, row_gap=1),
    TreeAttentionCase("strided-hybrid", "views of larger tensors, tree rows apart", (50, 17),
                      (bush(6, 9), chain(9)), page_size=1, row_gap=16, hybrid=True),
    TreeAttentionCase("most-tokens", "one token beyond four mask words, every kind of tree",
                      (33, 0, 5), (bush(129, 20), star(127), chain(128)), num_heads=1,
                      page_size=64),
    TreeAttentionCase("hybrid-most-tokens", "the same beside the pages", (0, 17),
                      (chain(129), star(129)), num_heads=1, page_size=1, hybrid=True),
    TreeAttentionCase("most-heads", "128 heads: a token fills tiles by itself", (9,),
                      (chain(2),), num_heads=128, page_size=32),
    TreeAttentionCase("most-sequences", "32 lengths and trees in one launch, some empty",
                      tuple(7 * n * n % 71 for n in range(32)),
                      tuple(bush(1 + n % 5, n) for n in range(32)), num_heads=1, page_size=32,
                      hybrid=True),
    TreeAttentionCase("odd-heads", "heads that no tile is a multiple of", (65, 31),
                      (bush(7, 22), star(9)), num_heads=7, page_size=1),
    TreeAttentionCase("shared-pages", "a prefix whose pages two sequences share", (70, 41, 32),
                      (bush(5, 23), chain(4), star(3)), page_size=16, shared_pages=2),
    TreeAttentionCase("huge-scores", "scores of 1e4: weights of 0 and 1, no overflow",
                      (45, 0, 130), (bush(9, 24), bush(12, 25), chain(4)), page_size=16,
                      query_scale=3e3),
    TreeAttentionCase("wide-value", "value wider than the rope part", (75, 9),
                      (bush(9, 10), chain(3)), value_dim=64, rope_dim=16, num_heads=5,
                      page_size=32),
    TreeAttentionCase("production", "DeepSeek-V3 widths, 8 heads of a TP8 rank, 9 tokens", (40,),
                      (bush(9, 11),), num_heads=8, value_dim=512, rope_dim=64, page_size=1),
    TreeAttentionCase("production-page128", "the same, whole tiles inside one page", (70,),
                      (bush(9, 12),), num_heads=8, value_dim=512, rope_dim=64, page_size=128),
    TreeAttentionCase("fp8", "a group of fewer values than 128; edges of tiles", (63, 64, 65, 0),
                      (bush(5, 26), chain(4), star(6), bush(7, 27)), page_size=16, is_fp8=True),
    TreeAttentionCase("fp8-groups", "several scales a row, rows of a view", (40, 0),
                      (bush(9, 28), star(3)), value_dim=256, rope_dim=32, page_size=1,
                      row_gap=16, is_fp8=True),
    TreeAttentionCase("fp8-hybrid", "fp8 rows beside the pages too", (33, 64),
                      (bush(9, 29), chain(3)), value_dim=128, page_size=32, hybrid=True,
                      is_fp8=True),
    TreeAttentionCase("fp8-production", "rows of 656 bytes, 9 tokens of 8 heads", (70,),
                      (bush(9, 30),), num_heads=8, value_dim=512, rope_dim=64, page_size=64,
                      is_fp8=True),
)  # fmt: skip

# The widths of DeepSeek-V3 and Kimi K2 with the heads of a TP8 rank and of a whole model.
PRODUCTION: tuple[TreeAttentionCase, ...] = tuple(
    TreeAttentionCase(
        name=f"{num_heads}x{tokens}-page{page_size}{'-hybrid' if hybrid else ''}",
        reason="a shape that is served",
        context_lens=(200,),
        trees=(bush(tokens, seed=tokens),),
        num_heads=num_heads,
        value_dim=512,
        rope_dim=64,
        page_size=page_size,
        hybrid=hybrid,
    )
    for hybrid in (False, True)
    for page_size in PAGE_SIZES
    for num_heads, tokens in ((8, 1), (8, 9), (8, 129), (64, 9), (128, 1))
)
PRODUCTION += tuple(
    replace(case, name=f"{case.name}-fp8", is_fp8=True)
    for case in PRODUCTION
    if case.page_size in (1, 64) and case.name.startswith("8x9-")
)
