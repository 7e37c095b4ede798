"""The DFlash drafter: one non-causal pass over a block of masks gives every depth at once.

::

    context row   c = RMS(fc [taps])            one for each committed position, all layers
                  k = RoPE(RMS(W_k c)), v = W_v c     kept in the drafter's context
    block row     [embed(root), embed(MASK) * horizon] at positions P .. P + horizon
                  attends the context and the whole block, then a gated MLP
    logits        row j of the block predicts the token at its own position P + j, j >= 1

The drafter borrows the target's embedding and output head. It never changes what is generated,
only how much of it a step commits.
Source: arXiv 2602.06036; z-lab/dflash dflash/model.py.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

from engine.config import DrafterConfig, TargetConfig
from engine.drafter_context import DrafterContext
from engine.drafter_layer import BlockRows, drafter_layer_shapes, read_drafter_layer
from engine.errors import ConfigError
from engine.layers import Rotary, rms_norm
from engine.target import Shape, Target


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

    def new_context(self, num_seqs: int) -> DrafterContext:
        """Return an empty context for `num_seqs` sequences."""

    def extend(self, context: DrafterContext, rows: TapRows) -> None:
        """Append the context rows of the positions that follow the context (mutated)."""

    def draft(self, context: DrafterContext, request: DraftRequest) -> Tensor:
        """Return draft logits [N, horizon, V] float32; row d is depth d + 1."""


class Drafter:
    """A DFlash drafter over the tensors of a checkpoint and its target's embedding and head.

    Parameters
    ----------
    config : DrafterConfig
    tensors : mapping of str to Tensor
        As `drafter_shapes` names them, on the target's device and of its dtype.
    target : Target
        Whose tokens are drafted.

    Raises
    ------
    ConfigError
        The configuration is of a drafter for another target.
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
        self.rotary = Rotary.of_drafter(config, self.fc.device)
        self.layers = tuple(
            read_drafter_layer(config, tensors, index) for index in range(config.num_hidden_layers)
        )

    def new_context(self, num_seqs: int) -> DrafterContext:
        """Return an empty context for `num_seqs` sequences."""
        return DrafterContext(self.config, num_seqs, dtype=self.fc.dtype, device=self.fc.device)

    def extend(self, context: DrafterContext, rows: TapRows) -> None:
        """Append the context rows of the positions that follow the context.

        Parameters
        ----------
        context : DrafterContext
            Mutated: rows are written and its lengths grow by `rows.counts`.
        rows : TapRows
            One count for each sequence of the context; zero is fine.
        """
        starts = context.lengths
        ends = [start + count for start, count in zip(starts, rows.counts, strict=True)]
        context.reserve(max(ends))
        if len(rows.taps):
            place = self._places(starts, rows.counts)
            features = functional.linear(rows.taps, self.fc)
            features = rms_norm(features, self.hidden_norm, self.config.rms_norm_eps)
            rotation = self.rotary.at(place[1], features.dtype)
            for layer in self.layers:
                context.write(layer.index, place, layer.keys_and_values(features, rotation))
        context.lengths = ends

    def draft(self, context: DrafterContext, request: DraftRequest) -> Tensor:
        """Draft the block behind each sequence's context.

        Parameters
        ----------
        context : DrafterContext
            Mutated behind its lengths only.
        request : DraftRequest
            Of the sequences of the context, in their order.

        Returns
        -------
        Tensor
            [N, horizon, V] float32 logits; row d is the token at depth d + 1.
        """
        block = self._block(context)
        context.reserve(max(context.lengths) + self.config.block_size)
        token_ids = torch.full(
            (context.num_seqs, self.config.block_size), self.config.mask_token_id
        )
        token_ids[:, 0] = torch.tensor(request.root_tokens)
        x = self.target.embed_tokens[token_ids.flatten().to(self.fc.device)]
        for layer in self.layers:
            x = layer(x, block, context)
        drafts = x.view(*token_ids.shape, -1)[:, 1:]
        normed = rms_norm(drafts, self.norm, self.config.rms_norm_eps)
        return functional.linear(normed, self.target.lm_head).float()

    def _block(self, context: DrafterContext) -> BlockRows:
        size = self.config.block_size
        seqs, positions = self._places(context.lengths, [size] * context.num_seqs)
        rotation = self.rotary.at(positions, self.fc.dtype)
        return BlockRows(seqs, positions, rotation, tuple(context.lengths), size)

    def _places(self, starts: Sequence[int], counts: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return sequence index and position of `counts[n]` rows from `starts[n]` on, packed."""
        parts = [torch.arange(start, start + n) for start, n in zip(starts, counts, strict=True)]
        seqs = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
        device = self.fc.device
        return seqs.to(device), torch.cat(parts).to(device)


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
