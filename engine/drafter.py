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
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from engine.config import DrafterConfig, TargetConfig
from engine.device import upload
from engine.drafter_context import DrafterContext, Sight
from engine.drafter_layer import (
    BlockRows,
    attention_bias,
    block_mask,
    drafter_layer_shapes,
    read_drafter_layer,
)
from engine.errors import ConfigError, ShapeError
from engine.layers import Rotary, rms_norm
from engine.target import Shape, Target

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
        self.tensors = dict(tensors)
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
        features = functional.linear(taps, self.fc)
        return rms_norm(features, self.hidden_norm, self.config.rms_norm_eps)

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
            for layer in self.layers:
                if context.sights[layer.index] == sight:
                    context.write(layer.index, rows, *layer.keys_and_values(kept, rotation))
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
        N, S = context.num_seqs, self.config.block_size
        host = torch.tensor((context.lengths, request.root_tokens))
        lengths, roots = upload(host, self.fc.device)
        block = self._block(context, lengths)
        masks = self.mask_row.expand(N, S - 1, -1)
        x = torch.cat((self.target.embed_tokens[roots].unsqueeze(1), masks), dim=1).flatten(0, 1)
        with sdpa_kernel(list(ATTENTION_BACKENDS)):
            for layer in self.layers:
                x = layer(x, block, context)
        drafts = x.view(N, S, -1)[:, 1:]
        normed = rms_norm(drafts, self.norm, self.config.rms_norm_eps)
        return functional.linear(normed, self.target.lm_head).float()

    def _block(self, context: DrafterContext, lengths: Tensor) -> BlockRows:
        steps = torch.arange(self.config.block_size, device=lengths.device)
        positions = lengths.unsqueeze(1) + steps
        group = self.config.num_attention_heads // self.config.num_key_value_heads
        biases = {
            sight: attention_bias(block_mask(context, sight, positions), group, self.fc.dtype)
            for sight in dict.fromkeys(context.sights)
            if sight != Sight()
        }
        return BlockRows(self.rotary.at(positions.flatten(), self.fc.dtype), biases)


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
