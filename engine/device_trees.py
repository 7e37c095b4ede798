"""Trees that stay on the device: built, verified, walked and moved there, read back once a step.

::

    build     candidates, then `draft_tree`: every tree in T = 1 + node budget rows
    verify    a pass over these rows as they lie; no size is known on the host, all are T
    commit    `walk_tree`, the rows of the paths moved in every layer, then one read of all it found

A step so waits for the device once, after the walk, and its trees are those of `engine.draft_tree`
bit for bit where the candidates are. Build and commit read and write memory that drafts and passes
leave where it is, so with graphs each is a replay from its second time on. Policies that share
nodes among sequences, or weigh them by a cost table, look at the trees between build and verify,
and so need them on the host.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import overload

import torch
from torch import Tensor

from engine.batch import StepBatch
from engine.candidates import check_candidates
from engine.config import EngineConfig
from engine.draft_tree import DraftTree
from engine.drafter import TapRows
from engine.errors import BackendError, ConfigError
from engine.kernels import OPS, Trees, Walk, draft_tree, likeliest_tokens, walk_tree
from engine.kernels.draft_tree import NO_TREE
from engine.kernels.operands import NO_TOKEN
from engine.kernels.tree_walk import NO_WALK
from engine.pass_graphs import Capture, Recurring, address, capture_for
from engine.sampling import check_chosen
from engine.target import PassRows
from engine.verify import Backends, TreeRows, Verified, lay_out

HOST = "host"  # the tree backend that keeps trees on the host


@dataclass(slots=True, eq=False)
class DeviceTrees(Sequence[DraftTree]):
    """The draft trees of a batch on the device; to look at one reads all back to the host.

    Where graphs are kept, they hold until the next trees are built.

    Parameters
    ----------
    rows : Trees
    longest_path : int
        Most nodes from a root down, the root included.
    """

    rows: Trees
    longest_path: int
    _sizes: tuple[int, ...] | None = None  # once they are known on the host
    _trees: list[DraftTree] = field(default_factory=list)  # once somebody has looked

    def plan(self, batch: StepBatch, backends: Backends, *, widens_table: bool) -> PassRows:
        """Reserve rows for the largest trees there can be and lay out the pass over them."""
        N, T = self.rows.token_ids.shape
        for seq in batch.seqs:
            batch.cache.reserve(seq, T if batch.scratch is None else self.longest_path)
        rows = TreeRows(
            token_ids=self.rows.token_ids.view(-1),
            positions=self.rows.positions.view(-1),
            ancestor_bits=self.rows.ancestor_bits,
            tree_sizes=(T,) * N,
        )
        return lay_out(
            *(batch.cache, batch.seqs, rows, backends),
            scratch=batch.scratch,
            widens_table=widens_table,
        )

    def note_sizes(self, tree_sizes: tuple[int, ...]) -> None:
        """Remember the size of each tree, now that it is known on the host."""
        self._sizes = tree_sizes

    @property
    def num_nodes(self) -> tuple[int, ...]:
        """Draft nodes of each tree; a wait until its step was committed."""
        if self._sizes is None:
            self._sizes = tuple(self.rows.tree_sizes.tolist())
            check_candidates(NO_TREE not in self._sizes)
        return tuple(size - 1 for size in self._sizes)

    def __len__(self) -> int:
        return len(self.rows.token_ids)

    @overload
    def __getitem__(self, index: int) -> DraftTree: ...
    @overload
    def __getitem__(self, index: slice) -> list[DraftTree]: ...
    def __getitem__(self, index: int | slice) -> DraftTree | list[DraftTree]:
        if not self._trees:
            rows = self.rows
            parts = (rows.token_ids, rows.parents, rows.depths, rows.path_log_probs)
            host = [part.cpu() for part in parts]
            self._trees = [
                DraftTree(*(part[n, : 1 + count] for part in host))
                for n, count in enumerate(self.num_nodes)
            ]
        return self._trees[index]


class TreeRunner:
    """Builds trees on the device, and commits there what the target said of them.

    Parameters
    ----------
    config : EngineConfig
    capture : Capture, optional
        What makes a replay of a build or a commit that comes again over the same memory.
    """

    def __init__(self, config: EngineConfig, capture: Capture | None) -> None:
        self._mode = config.mode
        self._backend = config.tree_backend
        # What finds candidates beside the trees' own kernels.
        self._finder = "reference" if self._backend == "reference" else "triton"
        self._builds = Recurring(capture)
        self._commits = Recurring(capture)

    def build(self, batch: StepBatch, draft_logits: Tensor, node_budget: int) -> DeviceTrees:
        """Build one tree for each sequence from logits [N, horizon, V], without a wait."""
        tokens = [sequence.root_token for sequence in batch.sequences]
        positions = [batch.cache.length(seq) for seq in batch.seqs]
        roots = self._builds.place("roots", torch.tensor((tokens, positions)), draft_logits.device)
        width = 1 if self._mode == "dflash" else node_budget

        def run() -> Trees:
            found = likeliest_tokens(draft_logits, width=width, backend=self._finder)
            return draft_tree(
                *(found.log_probs, found.token_ids, *roots.unbind()),
                node_budget=node_budget,
                backend=self._backend,
            )

        key = (address(draft_logits), address(roots), node_budget)
        return DeviceTrees(self._builds(key, run), 1 + min(draft_logits.shape[1], node_budget))

    def commit(
        self, batch: StepBatch, trees: DeviceTrees, verified: Verified
    ) -> tuple[tuple[int, ...], ...]:
        """Keep what the target agreed with, as `Engine.commit` does; errors are raised here."""
        moved = self._move(batch, trees, verified)
        taps = None
        if batch.context is not None:
            taps = verified.taps.index_select(0, moved.kept)
        found = _read(moved.found, trees.longest_path)
        trees.note_sizes(tuple(one.tree_size for one in found))
        for n, (sequence, one) in enumerate(zip(batch.sequences, found, strict=True)):
            batch.cache.advance(sequence.seq, len(one.tokens))
            if batch.scratch is not None:
                batch.scratch.clear(n)
            sequence.append_step(one.tokens, one.log_probs)
        appended = tuple(one.tokens for one in found)
        if taps is not None:
            counts = tuple(map(len, appended))
            batch.pending = TapRows(taps[: sum(counts)], counts)
        return appended

    def _move(self, batch: StepBatch, trees: DeviceTrees, verified: Verified) -> "_Moved":
        """Walk, and bring the rows of the paths to where committed ones go on, without a wait."""
        rows, width, scratch = trees.rows, trees.longest_path, batch.scratch
        slots = verified.slots.view(rows.token_ids.shape)
        pages = batch.cache.pages.flatten(1, 2)  # [layers, P * L, D], a view
        source, targets = pages, slots[:, :width]
        if scratch is not None:
            behind = torch.tensor([batch.cache.slots_behind(seq, width) for seq in batch.seqs])
            source = scratch.rows.flatten(1, 2)
            targets = self._commits.place("targets", behind, pages.device)
        said = (verified.target_tokens, verified.log_probs)

        def run() -> _Moved:
            walk = walk_tree(
                *(said[0], rows.token_ids, rows.parents, rows.tree_sizes, slots),
                width=width,
                backend=self._backend,
            )
            # All rows are read before any is written; those behind a path are not committed.
            taken = source.index_select(1, walk.sources.view(-1))
            pages.index_copy_(1, targets.flatten(), taken)
            return _Moved(_found(rows.tree_sizes, walk, said[1]), _kept_rows(walk, slots.shape[1]))

        parts = (
            *said,
            rows.token_ids,
            rows.parents,
            rows.tree_sizes,
            slots,
            targets,
            source,
            pages,
        )
        return self._commits((*map(address, parts), width), run)


@dataclass(frozen=True, slots=True, eq=False)
class _Moved:
    """What a step found and where its taps are, on the device."""

    found: Tensor  # [N, 2 + 3 * width] float64
    kept: Tensor  # [N * width] int64, packed rows of the pass: those that are kept, then others


@dataclass(frozen=True, slots=True)
class _Found:
    """What a step found for one sequence, on the host."""

    tree_size: int
    tokens: tuple[int, ...]  # appended: those of the accepted path and the bonus
    log_probs: tuple[float, ...]  # of these tokens


def num_nodes(trees: Sequence[DraftTree]) -> tuple[int, ...]:
    """Return the draft nodes of each tree, without a wait for those that were committed."""
    if isinstance(trees, DeviceTrees):
        return trees.num_nodes
    return tuple(tree.num_nodes for tree in trees)


def tree_runner(config: EngineConfig, device: torch.device) -> TreeRunner | None:
    """Return what an engine's configuration asks for; None where trees stay on the host.

    Raises
    ------
    BackendError
        The op table has no tree backend of this name, and it is not "host".
    ConfigError
        The policy has to look at trees before they are verified, or errors as in `capture_for`.
    """
    name, available = config.tree_backend, OPS["draft_tree"].implementations
    if name == HOST:
        return None
    if not isinstance(name, str) or name not in available:
        raise BackendError(
            f"tree_backend: expected one of {', '.join((HOST, *available))}, got {name!r} (no "
            "silent fall-back)"
        )
    if config.budget_policy != "fixed":
        raise ConfigError(
            f"tree_backend: expected 'host' for budget policy {config.budget_policy!r}, got "
            f"{name!r} (nodes are shared out between build and verify)"
        )
    # The reference reads back, which no graph can.
    if config.graphs == "off" or (config.graphs == "cuda" and name == "reference"):
        return TreeRunner(config, None)
    return TreeRunner(config, capture_for(config, device, warm_up_passes=0))


def _found(tree_sizes: Tensor, walk: Walk, log_probs: Tensor) -> Tensor:
    """Return all that a step found in one tensor: sizes, then nodes, tokens and log-probs."""
    # float64 holds node and token ids and both kinds of log-probs exactly.
    weights = log_probs.gather(1, walk.path).double()
    counts = (tree_sizes.unsqueeze(1), walk.num_accepted.unsqueeze(1))
    return torch.cat((*counts, walk.path, walk.tokens, weights), dim=1)


def _kept_rows(walk: Walk, num_rows: int) -> Tensor:
    """Return the packed rows of the nodes that are kept, sequence by sequence, then any others."""
    N, width = walk.path.shape
    if N == 1:
        return walk.path.view(-1)
    steps = torch.arange(width, device=walk.path.device)
    counts = 1 + walk.num_accepted.long().unsqueeze(1)
    first = counts.cumsum(0) - counts
    packed = torch.where(steps < counts, first + steps, N * width)
    rows = walk.path + num_rows * torch.arange(N, device=walk.path.device).unsqueeze(1)
    kept = rows.new_zeros(N * width + 1)
    return kept.scatter_(0, packed.flatten(), rows.flatten())[:-1]


def _read(found: Tensor, width: int) -> list[_Found]:
    """Read all that a step found by one copy; what was no distribution is a `ShapeError`."""
    rows = found.cpu().tolist()
    sizes, accepted = ([int(row[column]) for row in rows] for column in (0, 1))
    check_candidates(NO_TREE not in sizes)
    check_chosen(NO_TOKEN if count == NO_WALK else count for count in accepted)
    return [
        _Found(
            tree_size=size,
            tokens=tuple(map(int, row[2 + width : 3 + width + count])),
            log_probs=tuple(row[2 + 2 * width : 3 + 2 * width + count]),
        )
        for size, count, row in zip(sizes, accepted, rows, strict=True)
    ]
