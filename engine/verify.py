"""One target pass over a batch of draft trees: where its rows go and what each of them sees.

Node i of a tree is written at row P + i of its sequence, or at row i of its place in a scratch,
and rotated to position P + depth(i); it sees the P committed rows and its ancestors. A chunk of a
prompt is the tree whose nodes are one chain, so prefill takes the same way. Rows are packed tree
by tree, without padding.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.nn import functional

from engine.config import EngineConfig
from engine.device import ALIGNMENT, upload, upload_all
from engine.draft_tree import DraftTree
from engine.errors import BackendError
from engine.kernels import OPS
from engine.kernels.skinny_linear import MOST_ROWS
from engine.kernels.tree_attention import CUDA_BACKENDS
from engine.kv_cache import LatentCache
from engine.mla import AttentionPlan
from engine.sampling import check_chosen
from engine.target import PassRows, Target, TargetRows
from engine.tree_scratch import TreeScratch


def _check_backend(setting: str, name: str, op: str) -> None:
    """Refuse a backend that the op table does not have."""
    available = OPS[op].implementations
    if not isinstance(name, str) or name not in available:
        names = ", ".join(available)
        raise BackendError(
            f"{setting}: expected one of {names}, got {name!r} (no silent fall-back)"
        )


@dataclass(frozen=True, slots=True)
class Backends:
    """Which implementation of each op a target pass runs.

    Raises
    ------
    BackendError
        There is none of such a name.
    """

    attention: str = "reference"  # of tree_attention
    moe: str = "reference"  # of grouped_experts

    def __post_init__(self) -> None:
        _check_backend("attention_backend", self.attention, "tree_attention")
        _check_backend("moe_backend", self.moe, "grouped_experts")

    @property
    def rows(self) -> str:
        """Which implementation of `mla_rows` stands beside that of attention."""
        return "reference" if self.attention == "reference" else "triton"

    def linear(self, num_rows: int) -> str:
        """Which implementation of `skinny_linear` stands beside them in a pass of so many rows."""
        is_cuda = self.attention in CUDA_BACKENDS or self.moe == "cuda"
        return "cuda" if is_cuda and num_rows <= MOST_ROWS else "reference"

    @classmethod
    def of(cls, config: EngineConfig) -> "Backends":
        """Return what an engine's configuration names."""
        return cls(config.attention_backend, config.moe_backend)


REFERENCE = Backends()
WORDS = ALIGNMENT // 4  # of four bytes


@dataclass(frozen=True, slots=True, eq=False)
class Verified:
    """What the target said after each node of each tree; padding means nothing."""

    target_tokens: Tensor  # [N, T] int64, `NO_TOKEN` where logits are no distribution
    log_probs: Tensor  # [N, T], of those tokens
    taps: Tensor  # [M, num_taps * hidden], packed tree by tree
    offsets: tuple[int, ...]  # packed row of each tree's root
    slots: Tensor  # [M] int64, where each row was written

    def to_host(self, trees: Sequence[DraftTree]) -> "Verified":
        """Read tokens and log-probs back by one copy; a row without a token is a `ShapeError`."""
        # float64 holds token ids and both kinds of log-probs exactly.
        tokens, log_probs = torch.stack(
            (self.target_tokens.double(), self.log_probs.double())
        ).cpu()
        said = replace(self, target_tokens=tokens.long(), log_probs=log_probs)
        for tree, row in zip(trees, said.target_tokens.tolist(), strict=True):
            check_chosen(row[: tree.tree_size])
        return said


@dataclass(frozen=True, slots=True, eq=False)
class TreeRows:
    """What a pass reads of N trees; tensors are on its device."""

    token_ids: Tensor  # [M] int64, packed tree by tree
    positions: Tensor  # [M] int64, absolute
    ancestor_bits: Tensor  # [N, T, W] int32
    tree_sizes: tuple[int, ...]


def chain(token_ids: Sequence[int]) -> DraftTree:
    """Return the tree in which every token is the only child of the one before it."""
    depths = torch.arange(len(token_ids), dtype=torch.int32)
    return DraftTree(
        token_ids=torch.tensor(token_ids, dtype=torch.int64),
        parents=depths - 1,
        depths=depths,
        path_log_probs=torch.zeros(len(token_ids), dtype=torch.float64),
    )


def plan_pass(
    cache: LatentCache,
    seqs: Sequence[int],
    trees: Sequence[DraftTree],
    backends: Backends,
    *,
    scratch: TreeScratch | None = None,
    widens_table: bool = False,
) -> PassRows:
    """Reserve rows for one tree of each sequence and lay out the pass.

    Parameters
    ----------
    cache : LatentCache
        Mutated: pages are reserved for every tree, or with a scratch for its longest path.
    seqs : sequence of N int
    trees : sequence of N DraftTree, on the host
    backends : Backends
    scratch : TreeScratch, optional
        Where the rows of the trees go; in pages behind the committed rows if None.
    widens_table : bool
        Whether the page table is as wide as a power of two, so that few passes differ in it.

    Raises
    ------
    OutOfPagesError
        Too few pages are free; sequences before the failing one keep what was reserved for them.
    """
    sizes = tuple(tree.tree_size for tree in trees)
    for seq, tree in zip(seqs, trees, strict=True):
        longest_path = 1 + int(tree.depths.max())
        cache.reserve(seq, tree.tree_size if scratch is None else longest_path)
    lengths = [cache.length(seq) for seq in seqs]
    device = cache.pages.device
    tokens = torch.cat([tree.token_ids for tree in trees])
    positions = torch.cat([n + tree.depths for n, tree in zip(lengths, trees, strict=True)])
    host = (tokens, positions.long(), _stack_bits(trees))
    tokens, positions, bits = upload_all(host, device)
    tree_rows = TreeRows(tokens, positions, bits, sizes)
    return lay_out(cache, seqs, tree_rows, backends, scratch=scratch, widens_table=widens_table)


def lay_out(
    cache: LatentCache,
    seqs: Sequence[int],
    rows: TreeRows,
    backends: Backends,
    *,
    scratch: TreeScratch | None,
    widens_table: bool,
) -> PassRows:
    """Lay out the pass over trees whose rows are reserved; the arguments are as in `plan_pass`."""
    sizes, device = rows.tree_sizes, cache.pages.device
    lengths = [cache.length(seq) for seq in seqs]
    slots = _slots(cache, seqs, sizes, scratch)
    places, context_lens, tree_sizes = _upload_numbers(slots, lengths, sizes, device)
    attention = AttentionPlan(
        cache=cache,
        scratch=scratch,
        backend=backends.attention,
        rows_backend=backends.rows,
        linear_backend=backends.linear(len(rows.token_ids)),
        slots=places,
        padded_index=_padded_index(sizes, device),
        page_table=cache.page_table(seqs, max_pages=_table_width(cache, seqs, widens_table)),
        context_lens=context_lens,
        ancestor_bits=rows.ancestor_bits,
        tree_sizes=tree_sizes,
    )
    return PassRows(rows.token_ids, rows.positions, attention, backends.moe, sizes)


def append_chain(
    target: Target,
    cache: LatentCache,
    seq: int,
    token_ids: Sequence[int],
    *,
    backends: Backends,
    tap_ids: Sequence[int],
) -> TargetRows:
    """Run tokens that are certain, a prompt's chunk, and commit their rows (cache mutated)."""
    passed = target.forward(plan_pass(cache, [seq], [chain(token_ids)], backends), tap_ids)
    cache.advance(seq, len(token_ids))
    return passed


def _table_width(cache: LatentCache, seqs: Sequence[int], widens: bool) -> int | None:
    """Return the width of a pass's page table; None = that of the longest sequence."""
    if not widens:
        return None
    longest = max(cache.capacity(seq) for seq in seqs) // cache.shape.page_size
    return 1 << max(0, longest - 1).bit_length()


def _slots(
    cache: LatentCache, seqs: Sequence[int], sizes: Sequence[int], scratch: TreeScratch | None
) -> list[int]:
    """Return where the packed rows are written: in the cache, or in the scratch if there is one."""
    if scratch is None:
        parts = (cache.slots_behind(seq, size) for seq, size in zip(seqs, sizes, strict=True))
        return [slot for part in parts for slot in part]
    return _grid_index(sizes, scratch.shape.max_rows)


def _upload_numbers(
    slots: Sequence[int], lengths: Sequence[int], sizes: Sequence[int], device: torch.device
) -> tuple[Tensor, Tensor, Tensor]:
    """Bring slots as int64 and the others as int32 up, as one list of words.

    It is what `upload_all` does, with a third of the operations, in every step.
    """
    words = [word for slot in slots for word in (slot, 0)]  # the low one first
    starts = []
    for numbers in (lengths, sizes):
        words += [0] * (-len(words) % WORDS)
        starts.append(len(words))
        words += numbers
    sent = upload(torch.tensor(words, dtype=torch.int32), device)
    context_lens, tree_sizes = (sent[start : start + len(sizes)] for start in starts)
    return sent[: 2 * len(slots)].view(torch.int64), context_lens, tree_sizes


def _padded_index(sizes: Sequence[int], device: torch.device) -> Tensor | None:
    """Return where packed rows lie in the `[N, T]` grid; None if every tree fills its row."""
    widest = max(sizes)
    if min(sizes) == widest:
        return None
    return upload(torch.tensor(_grid_index(sizes, widest)), device)


def _grid_index(sizes: Sequence[int], width: int) -> list[int]:
    """Return where packed rows lie in a grid of `width` rows for each tree."""
    return [n * width + row for n, size in enumerate(sizes) for row in range(size)]


def _stack_bits(trees: Sequence[DraftTree]) -> Tensor:
    """Stack ancestor words to [N, T, W]; the bits of padding are zero."""
    bits = [tree.ancestor_bits() for tree in trees]
    rows, words = max(b.shape[0] for b in bits), max(b.shape[1] for b in bits)
    padded = [functional.pad(b, (0, words - b.shape[1], 0, rows - b.shape[0])) for b in bits]
    return torch.stack(padded)
