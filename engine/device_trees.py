"""Trees that stay on the device: built, verified, walked and moved there, read back once a step.

::

    build     candidates, then `draft_tree`: every tree in T = 1 + node budget rows
    verify    a pass over these rows as they lie; no size is known on the host, all are T
    commit    `walk_tree`, the rows of the paths moved in every layer, then one read of all it found

A step so waits for the device once, after the walk, and its trees are those of `engine.draft_tree`
bit for bit where the candidates are. Policies that share nodes among sequences, or weigh them by a
cost table, look at the trees between build and verify, and so need them on the host.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import overload

import torch
from torch import Tensor

from engine.batch import StepBatch
from engine.candidates import check_candidates, likeliest
from engine.config import EngineConfig
from engine.device import upload
from engine.draft_tree import DraftTree
from engine.drafter import TapRows
from engine.errors import BackendError, ConfigError
from engine.kernels import OPS, Trees, Walk, draft_tree, walk_tree
from engine.kernels.draft_tree import NO_TREE
from engine.kernels.tree_walk import NO_WALK
from engine.sampling import NO_TOKEN, check_chosen
from engine.target import PassRows
from engine.verify import Backends, TreeRows, Verified, lay_out

HOST = "host"  # the tree backend that keeps trees on the host


@dataclass(slots=True, eq=False)
class DeviceTrees(Sequence[DraftTree]):
    """The draft trees of a batch on the device; to look at one reads all back to the host.

    Parameters
    ----------
    rows : Trees
    longest_path : int
        Most nodes from a root down, the root included.
    backend : str
        Of `walk_tree`.
    """

    rows: Trees
    longest_path: int
    backend: str
    _sizes: tuple[int, ...] | None = None  # once they are known on the host
    _trees: list[DraftTree] = field(default_factory=list)  # once somebody has looked

    @classmethod
    def build(
        cls, batch: StepBatch, draft_logits: Tensor, node_budget: int, config: EngineConfig
    ) -> "DeviceTrees":
        """Build one tree for each sequence from logits [N, horizon, V], without a wait."""
        found = likeliest(draft_logits, 1 if config.mode == "dflash" else node_budget)
        tokens = [sequence.root_token for sequence in batch.sequences]
        positions = [batch.cache.length(seq) for seq in batch.seqs]
        roots = upload(torch.tensor([tokens, positions]), draft_logits.device)
        trees = draft_tree(
            found.log_probs,
            found.token_ids,
            roots[0],
            roots[1],
            node_budget=node_budget,
            backend=config.tree_backend,
        )
        longest_path = 1 + min(draft_logits.shape[1], node_budget)
        return cls(trees, longest_path, config.tree_backend)

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

    def commit(self, batch: StepBatch, verified: Verified) -> tuple[tuple[int, ...], ...]:
        """Keep what the target agreed with, as `Engine.commit` does; errors are raised here."""
        N, T = self.rows.token_ids.shape
        slots = verified.slots.view(N, T)
        walk = walk_tree(
            *(verified.target_tokens, self.rows.token_ids, self.rows.parents),
            *(self.rows.tree_sizes, slots),
            width=self.longest_path,
            backend=self.backend,
        )
        self._move(batch, walk, slots)
        found = _read(self.rows.tree_sizes, walk, verified.log_probs)
        self._sizes = tuple(one.tree_size for one in found)
        appended, tap_rows = [], []
        for n, (sequence, one) in enumerate(zip(batch.sequences, found, strict=True)):
            batch.cache.advance(sequence.seq, len(one.tokens))
            if batch.scratch is not None:
                batch.scratch.clear(n)
            sequence.append_step(one.tokens, one.log_probs)
            tap_rows += [n * T + node for node in one.nodes]
            appended.append(one.tokens)
        if batch.context is not None:
            chosen = upload(torch.tensor(tap_rows), verified.taps.device)
            counts = tuple(map(len, appended))
            batch.pending = TapRows(verified.taps.index_select(0, chosen), counts)
        return tuple(appended)

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

    def _move(self, batch: StepBatch, walk: Walk, slots: Tensor) -> None:
        """Bring the rows of the paths to where committed ones go on, in every layer.

        All are read before any is written. Rows behind the end of a path are not committed.
        """
        cache, width = batch.cache, self.longest_path
        pages = cache.pages.flatten(1, 2)  # [layers, P * L, D], a view
        sources = walk.sources.view(-1)
        if batch.scratch is None:
            pages.index_copy_(1, slots[:, :width].flatten(), pages.index_select(1, sources))
            return
        spans = ((seq, cache.length(seq)) for seq in batch.seqs)
        targets = [cache.slots(seq, range(length, length + width)) for seq, length in spans]
        pages.index_copy_(1, torch.cat(targets), batch.scratch.gather(sources))


@dataclass(frozen=True, slots=True)
class _Found:
    """What a step found for one sequence, on the host."""

    tree_size: int
    nodes: tuple[int, ...]  # kept: the root and the accepted path
    tokens: tuple[int, ...]  # appended: those of the accepted path and the bonus
    log_probs: tuple[float, ...]  # of these tokens


def num_nodes(trees: Sequence[DraftTree]) -> tuple[int, ...]:
    """Return the draft nodes of each tree, without a wait for those that were committed."""
    if isinstance(trees, DeviceTrees):
        return trees.num_nodes
    return tuple(tree.num_nodes for tree in trees)


def check_tree_backend(config: EngineConfig) -> None:
    """Refuse a tree backend that does not exist or cannot serve the policy.

    Raises
    ------
    BackendError
        The op table has none of this name, and it is not "host".
    ConfigError
        The policy has to look at trees before they are verified.
    """
    name, available = config.tree_backend, OPS["draft_tree"].implementations
    if name == HOST:
        return
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


def _read(tree_sizes: Tensor, walk: Walk, log_probs: Tensor) -> list[_Found]:
    """Read all that a step found by one copy; what was no distribution is a `ShapeError`."""
    # float64 holds node and token ids and both kinds of log-probs exactly.
    counts = torch.stack((tree_sizes, walk.num_accepted), dim=1).double()  # [N, 2]
    kept = (walk.path.double(), walk.tokens.double(), log_probs.gather(1, walk.path).double())
    rows = torch.cat((counts, *kept), dim=1).cpu()  # [N, 2 + 3 * width]
    width = walk.path.shape[1]
    sizes, accepted = rows[:, :2].long().T.tolist()
    check_candidates(NO_TREE not in sizes)
    check_chosen(NO_TOKEN if count == NO_WALK else count for count in accepted)
    nodes, tokens = rows[:, 2 : 2 + 2 * width].long().view(-1, 2, width).unbind(1)
    parts = zip(sizes, accepted, nodes.tolist(), tokens.tolist(), strict=True)
    weights = rows[:, 2 + 2 * width :].tolist()
    return [
        _Found(size, *(tuple(values[: 1 + count]) for values in (path, said, weight)))
        for (size, count, path, said), weight in zip(parts, weights, strict=True)
    ]
