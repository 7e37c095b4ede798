"""The DFlash drafter: one non-causal pass over a block of masks gives every depth at once.

::

    feature       c = RMS(fc [taps])            one for each committed position, all layers
    context row   k = RoPE(RMS(W_k c)), v = W_v c     kept in the drafter's context
    block row     [embed(root), embed(MASK) * horizon] at positions P .. P + horizon
                  attends the context and the whole block, then a gated MLP
    logits        row j of the block predicts the token at its own position P + j, j >= 1

The drafter borrows the target's embedding and output head; a checkpoint may bring a mask embedding
of its own. It never changes what is generated, only how much of it a step commits.
Source: arXiv 2602.06036; z-lab/dflash dflash/model.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from engine.config import DrafterConfig, TargetConfig
from engine.context_projection import ContextProjection
from engine.context_rows import ContextRows, Sight
from engine.device import Aside, upload
from engine.drafter_context import DrafterContext
from engine.drafter_layer import (
    BlockRows,
    DrafterLayer,
    LayerBackends,
    drafter_layer_shapes,
    joined_names,
    read_drafter_layer,
)
from engine.errors import ConfigError, ShapeError
from engine.layers import Rotary, Rotation, Stream, behind_each_other
from engine.target import Shape, Target
from engine.whole_attention import BlockAttention, PagedAttention, SlicedAttention
from engine.window_attention import WindowAttention

MASK_EMBEDDING = "mask_embedding.weight"  # optional: the target's own row of the mask otherwise

# Not cuDNN's, whose host plans tens of milliseconds for every new length of a context.
ATTENTION_BACKENDS = (
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
)


@dataclass(frozen=True, slots=True, eq=False)
class TapRows:
    """Taps of positions the drafter's context lacks, packed sequence by sequence."""

    taps: Tensor  # [M, num_taps * hidden]
    counts: tuple[int, ...]  # rows of each sequence; M in total

    def select(self, indices: Sequence[int]) -> "TapRows":
        """Return the rows of the sequences at `indices`, in that order."""
        ends = torch.tensor(self.counts).cumsum(0).tolist()
        parts = [self.taps[ends[i] - self.counts[i] : ends[i]] for i in indices]
        taps = torch.cat(parts) if parts else self.taps[:0]
        return TapRows(taps, tuple(self.counts[i] for i in indices))


@dataclass(frozen=True, slots=True)
class DraftRequest:
    """What a drafter is told of N sequences when it drafts their next block."""

    root_tokens: tuple[int, ...]
    num_generated: tuple[int, ...]  # tokens after the prompt, the root among them
    sequence_ids: tuple[int, ...]  # index of each sequence's prompt in its batch


@dataclass(frozen=True, slots=True, eq=False)
class BlockInputs:
    """What the next blocks of N sequences are drafted from, all of it on the device.

    At most S = block_size rows follow the context of each sequence; they are packed sequence by
    sequence, and what lies behind the last of them in `taps` may be anything.
    """

    taps: Tensor  # [N * S, num_taps * hidden]
    lengths: Tensor  # [N] int64, context rows before these
    counts: Tensor  # [N] int64, new rows of each sequence, 0..S
    tokens: Tensor  # [N, k] int64, `block_tokens` of the request
    heads: Mapping[Sight, Tensor]  # `ContextRows.heads`
    whole: PagedAttention | None  # None where no layer sees everything
    backends: LayerBackends


@dataclass(frozen=True, slots=True, eq=False)
class Drafted:
    """What drafting from `BlockInputs` gives."""

    logits: Tensor  # [N, horizon, V] float32
    features: Tensor  # [N * S, hidden] of the taps


class DraftModel(Protocol):
    """Anything that proposes blocks: `Drafter`, or a wrapper around one."""

    @property
    def config(self) -> DrafterConfig:
        """The block size, the taps it wants and the rest of its architecture."""

    def new_context(self, num_seqs: int, *, max_context: int | None = None) -> DrafterContext:
        """Return an empty context for `num_seqs` sequences; a knob for full layers."""

    def extend(self, context: DrafterContext, rows: TapRows) -> Tensor:
        """Append the context rows of the positions that follow (mutated); return their features."""

    def extend_features(
        self, context: DrafterContext, features: Tensor, counts: Sequence[int]
    ) -> None:
        """Append context rows of features that an earlier `extend` returned (mutated)."""

    def draft(self, context: DrafterContext, request: DraftRequest) -> Tensor:
        """Return draft logits [N, horizon, V] float32; row d is depth d + 1."""

    def block_tokens(self, request: DraftRequest) -> list[list[int]]:
        """Return the tokens that each block is drafted from: the root, then equally many more."""

    def complete_and_draft(self, rows: ContextRows, inputs: BlockInputs) -> Drafted:
        """Write the context rows of `inputs` (`rows` mutated) and draft the block behind them.

        What is launched depends on shapes alone, so that a CUDA graph of it can be replayed.
        """


class Drafter:
    """A DFlash drafter over the tensors of a checkpoint and its target's embedding and head.

    Parameters
    ----------
    config : DrafterConfig
    tensors : mapping of str to Tensor
        As `drafter_shapes` names them, on the target's device and of its dtype; also, from
        checkpoints that have it, `MASK_EMBEDDING` [hidden].
    target : Target
        Whose tokens are drafted.

    Raises
    ------
    ConfigError
        The configuration is of a drafter for another target.
    ShapeError
        The mask embedding is not one row.
    """

    def __init__(
        self, config: DrafterConfig, tensors: Mapping[str, Tensor], target: Target
    ) -> None:
        check_pair(config, target.config)
        self.config = config
        self.tensors = tensors = behind_each_other(tensors, joined_names(config))
        self.target = target
        self.fc = tensors["fc.weight"]  # [hidden, num_taps * hidden]
        self.hidden_norm = tensors["hidden_norm.weight"]
        self.norm = tensors["norm.weight"]
        self.mask_row = tensors.get(MASK_EMBEDDING, target.embed_tokens[config.mask_token_id])
        if self.mask_row.shape != (config.hidden_size,):
            raise ShapeError(
                f"{MASK_EMBEDDING}: expected [{config.hidden_size}], got "
                f"{list(self.mask_row.shape)} (the input row of every mask)"
            )
        self.rotary = Rotary.of_drafter(config, self.fc.device)
        self.layers = tuple(
            read_drafter_layer(config, tensors, index) for index in range(config.num_hidden_layers)
        )

    def new_context(self, num_seqs: int, *, max_context: int | None = None) -> DrafterContext:
        """Return an empty context for `num_seqs` sequences.

        `max_context` bounds the keys that a row of a full layer sees behind itself, itself
        included; None = all of them. Sliding layers have their window.
        """
        return DrafterContext(
            self.config,
            num_seqs,
            max_context=max_context,
            dtype=self.fc.dtype,
            device=self.fc.device,
        )

    def features(self, taps: Tensor) -> Tensor:
        """Return the feature [M, hidden] of each position from its taps [M, num_taps * hidden]."""
        return self._features(taps, LayerBackends())

    def _features(self, taps: Tensor, backends: LayerBackends) -> Tensor:
        features = Stream(functional.linear(taps, self.fc))
        return features.normed(self.hidden_norm, self.config.rms_norm_eps, backends.rows)[1]

    def extend(self, context: DrafterContext, rows: TapRows) -> Tensor:
        """Append the context rows of the positions that follow the context.

        Parameters
        ----------
        context : DrafterContext
            Mutated: rows are written and its lengths grow by `rows.counts`.
        rows : TapRows
            One count for each sequence of the context; zero is fine.

        Returns
        -------
        Tensor
            [M, hidden] features of those positions, for `extend_features` of another context.
        """
        features = self.features(rows.taps)
        self.extend_features(context, features, rows.counts)
        return features

    def extend_features(
        self, context: DrafterContext, features: Tensor, counts: Sequence[int]
    ) -> None:
        """Append the context rows of positions whose features are known.

        Parameters
        ----------
        context : DrafterContext
            Mutated: the rows its layers keep are written, and its lengths grow by `counts`.
        features : Tensor
            [M, hidden], packed sequence by sequence.
        counts : sequence of int
            Rows of each sequence of the context, M in total; zero is fine.

        Raises
        ------
        ShapeError
            Counts and features do not belong together.
        """
        if len(features) != sum(counts):
            raise ShapeError(
                f"features: expected {sum(counts)} rows, got {len(features)} (the sum of counts)"
            )
        placed = {sight: context.place(counts, sight) for sight in dict.fromkeys(context.sights)}
        context.reserve(
            max(length + count for length, count in zip(context.lengths, counts, strict=True))
        )
        for sight, rows in placed.items():
            kept = features if rows.source is None else features[rows.source]
            rotation = self.rotary.at(rows.positions, features.dtype)
            index = context.rows.index(sight, rows.seqs, rows.slots)
            for layer in self._layers_of(context.rows, sight):
                context.rows.write(layer.index, index, *layer.keys_and_values(kept, rotation))
        context.advance(counts)

    def draft(self, context: DrafterContext, request: DraftRequest) -> Tensor:
        """Draft the block behind each sequence's context.

        Parameters
        ----------
        context : DrafterContext
            Only its temporary rows are mutated.
        request : DraftRequest
            Of the sequences of the context, in their order.

        Returns
        -------
        Tensor
            [N, horizon, V] float32 logits; row d is the token at depth d + 1.

        Raises
        ------
        CacheError
            A sequence that was started late lacks rows the block sees.
        """
        context.check_complete()
        host = torch.tensor((context.lengths, request.root_tokens))
        lengths, roots = upload(host, self.fc.device)
        sights = dict.fromkeys(context.sights)
        num_slots = {sight: context.num_slots(sight) for sight in sights}
        whole = SlicedAttention(tuple(context.lengths))
        positions = lengths.unsqueeze(1) + torch.arange(self.config.block_size, device=roots.device)
        rotation = self.rotary.at(positions.flatten(), self.fc.dtype)
        backends = LayerBackends()
        attention = _attention(lengths, num_slots, whole, backends.rows)
        block = BlockRows(rotation, attention, backends)
        return self._draft(context.rows, self._block_rows(roots), block)

    def block_tokens(self, request: DraftRequest) -> list[list[int]]:
        """Return the root of each sequence."""
        return [[root] for root in request.root_tokens]

    def complete_and_draft(self, rows: ContextRows, inputs: BlockInputs) -> Drafted:
        """Write the context rows of `inputs` (`rows` mutated) and draft the block behind them.

        A place of the block without a new row gets one all the same: in the block's own place of
        the context, where the block itself is written next.
        """
        device, N = self.fc.device, rows.num_seqs
        with Aside(device) as aside:
            steps = torch.arange(self.config.block_size, device=device)
            lengths = torch.stack((inputs.lengths, inputs.lengths + inputs.counts))
            positions = lengths.unsqueeze(2) + steps  # [2, N, S], of the new rows and of the block
            rotations = _halves(self.rotary.at(positions.flatten(), self.fc.dtype))
            first = inputs.counts.cumsum(0) - inputs.counts  # packed row of each sequence's first
            source = (first.unsqueeze(1) + steps).clamp_(max=len(inputs.taps) - 1)
            index = _new_places(rows, inputs, positions[0], steps)
            num_slots = {sight: sight.num_kept(rows.capacity) for sight in rows.sights}
            whole = SlicedAttention(()) if inputs.whole is None else inputs.whole.at(lengths[1])
            attention = _attention(lengths[1], num_slots, whole, inputs.backends.rows)
            x = self._block_rows(inputs.tokens[:, 0])
        features = self._features(inputs.taps, inputs.backends)
        aside.join()
        new = self._projection(features if N == 1 else features[source.flatten()])
        for layer, made in zip(self.layers, new, strict=True):
            places = index[rows.sights[layer.index]]
            layer.keep(made, rotations[0], rows.packed(layer.index), places, inputs.backends.rows)
        block = BlockRows(rotations[1], attention, inputs.backends)
        return Drafted(self._draft(rows, x, block), features)

    def _block_rows(self, roots: Tensor) -> Tensor:
        """Return what blocks behind `roots` [N] begin as, [N, S, hidden]."""
        masks = self.mask_row.expand(len(roots), self.config.horizon, -1)
        return torch.cat((self.target.embed_tokens[roots].unsqueeze(1), masks), dim=1)

    def _draft(self, rows: ContextRows, x: Tensor, block: BlockRows) -> Tensor:
        stream = Stream(x.flatten(0, 1))
        with sdpa_kernel(list(ATTENTION_BACKENDS)):
            for layer in self.layers:
                stream = layer(stream, block, rows)
        _, normed = stream.normed(self.norm, self.config.rms_norm_eps, block.backends.rows)
        return functional.linear(normed.view(x.shape)[:, 1:], self.target.lm_head).float()

    @cached_property
    def _projection(self) -> ContextProjection:
        return ContextProjection.of(self.layers)

    def _layers_of(self, rows: ContextRows, sight: Sight) -> list[DrafterLayer]:
        return [layer for layer in self.layers if rows.sights[layer.index] == sight]


def _attention(
    lengths: Tensor, num_slots: Mapping[Sight, int], whole: BlockAttention, backend: str
) -> dict[Sight, BlockAttention]:
    """Return how blocks behind `lengths` [N] rows attend so many context slots and themselves."""
    return {
        sight: whole
        if sight.behind is None or sight.ring is None
        else WindowAttention(sight.behind, sight.ahead, sight.ring, lengths, count, backend)
        for sight, count in num_slots.items()
    }


def _new_places(
    rows: ContextRows, inputs: BlockInputs, positions: Tensor, steps: Tensor
) -> dict[Sight, Tensor]:
    """Return where rows at `positions` [N, S] of layers of each sight are written, head by head."""
    is_new, spare = steps < inputs.counts.unsqueeze(1), steps - rows.block_size
    slots = {sight: torch.where(is_new, sight.slots(positions), spare) for sight in inputs.heads}
    return {
        sight: (heads.unsqueeze(1) + slots[sight].unsqueeze(2)).flatten()
        for sight, heads in inputs.heads.items()
    }


def _halves(rotation: Rotation) -> tuple[Rotation, Rotation]:
    """Return the rotations of the first and of the second half of the rows."""
    first, second = zip(rotation.cos.chunk(2), rotation.sin.chunk(2), strict=True)
    return Rotation(*first), Rotation(*second)


def check_pair(config: DrafterConfig, target: TargetConfig) -> None:
    """Refuse a drafter whose sizes are not its target's with a `ConfigError`."""
    for name, wanted in (
        ("hidden_size", target.hidden_size),
        ("vocab_size", target.vocab_size),
        ("num_target_layers", target.num_hidden_layers),
    ):
        if getattr(config, name) != wanted:
            raise ConfigError(
                f"drafter {name}: expected {wanted}, got {getattr(config, name)} "
                "(the target's; the drafter reads its taps, embedding and head)"
            )


def drafter_shapes(config: DrafterConfig) -> dict[str, Shape]:
    """Return the shape of every tensor of a drafter by its name."""
    hidden = config.hidden_size
    shapes: dict[str, Shape] = {
        "fc.weight": (hidden, len(config.target_layer_ids) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    layer = drafter_layer_shapes(config)
    for index in range(config.num_hidden_layers):
        shapes |= {f"layers.{index}.{name}": shape for name, shape in layer.items()}
    return shapes
