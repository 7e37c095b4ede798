"""The drafter's training: blocks at random anchors, distilled from the frozen target.

The draft of depth d is trained towards the target's distribution of that position given the text
up to it, so that its probabilities mean what the tree builder takes them for.
"""

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from engine.checkpoints.tiny.batches import windows
from engine.checkpoints.tiny.model import DraftBlocks, draft_blocks, drafter_pass
from engine.checkpoints.tiny.target_task import (
    HELD_OUT_WINDOWS,
    Compile,
    TargetRunner,
    autocast,
    initial_tensors,
    repeated,
    rounded,
    trainable,
)
from engine.config import DrafterConfig
from engine.drafter import Drafter, drafter_shapes
from engine.layers import Rotary, Rotation
from engine.target import Target
from engine.weights import save_drafter

DEPTH_DECAY = 0.9  # weight of a depth in the loss over that of the depth before
LONG = 4096  # from this length on anchors lie half as dense
TOKENS_PER_ANCHOR = (16, 32)
RESIDUAL = 0.4  # what layers add to the residual stream at the start
SHARED = ("model.embed_tokens.weight", "lm_head.weight")  # of the target


class DrafterTask:
    """A drafter to train for a frozen target."""

    def __init__(
        self,
        config: DrafterConfig,
        target: Target,
        out: Path,
        texts: Mapping[str, bytes],
        compile_pass: Compile,
        seed: int,
    ) -> None:
        self.config, self.target, self.out, self.texts = config, target, out, texts
        frozen = {name: tensor.float() for name, tensor in target.tensors.items()}
        self.run_target = TargetRunner(target.config, frozen, compile_pass)
        self.device = self.run_target.device
        generator = torch.Generator().manual_seed(seed)
        drawn = initial_tensors(drafter_shapes(config), generator, RESIDUAL)
        self.parameters = trainable({name: t.to(self.device) for name, t in drawn.items()})
        self.tensors = self.parameters | {name: frozen[name] for name in SHARED}
        self.rng = np.random.default_rng(seed)
        self.table = Rotation(torch.empty(0), torch.empty(0))
        self.length = 0
        self._pass = compile_pass(drafter_pass)

    def begin(self, length: int) -> None:
        """Prepare for sequences of `length` bytes."""
        self.length = length
        positions = torch.arange(length, device=self.device)
        self.table = Rotary.of_drafter(self.config, self.device).at(positions, torch.float32)

    def loss(self, token_ids: Tensor) -> Tensor:
        """Return the cross-entropy against the target's distributions, weighted over depths."""
        token_ids = token_ids[:, : self.length]
        num_anchors = self.length // TOKENS_PER_ANCHOR[self.length >= LONG]
        last = self.length - self.config.block_size
        drawn = self.rng.integers(last + 1, size=(len(token_ids), num_anchors))
        drafts, teacher = self._drafts_and_teacher(token_ids, torch.from_numpy(drawn))
        entropies = -(teacher.softmax(-1) * drafts.log_softmax(-1)).sum(-1).mean((0, 1))
        weights = DEPTH_DECAY ** torch.arange(self.config.horizon, device=self.device)
        return (entropies * weights).sum() / weights.sum()

    def after_step(self, rate: float) -> None:
        """Do nothing: all of a drafter is learnt by gradients."""

    def save(self) -> None:
        """Write the drafter as it is now."""
        save_drafter(Drafter(self.config, rounded(self.parameters), self.target), self.out)

    @torch.no_grad()
    def report(self) -> str:
        """Give, for each held-out text, how many leading drafts are the target's likeliest."""
        parts = []
        for name, text in self.texts.items():
            token_ids = windows(text, self.length, HELD_OUT_WINDOWS).to(self.device)
            anchors = torch.arange(
                self.length // 2, self.length - self.config.block_size, self.config.block_size
            )
            drafts, teacher = self._drafts_and_teacher(
                token_ids, anchors.expand(len(token_ids), -1)
            )
            agrees = drafts.argmax(-1) == teacher.argmax(-1)
            leading = agrees.cumprod(-1).sum(-1).float().mean().item()
            parts.append(f"{name} {leading:.2f} of {self.config.horizon} drafts right")
        return ", ".join(parts)

    def _drafts_and_teacher(self, token_ids: Tensor, anchors: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits of drafter and target for each depth, [B, A, horizon, V] each."""
        anchors = anchors.to(self.device)
        with torch.no_grad():
            passed = self.run_target(token_ids, self.config.target_layer_ids)
            before = anchors.unsqueeze(-1) + torch.arange(self.config.horizon, device=self.device)
            rows = torch.arange(len(token_ids), device=self.device).view(-1, 1, 1)
            teacher = passed.logits[rows, before]
            blocks: DraftBlocks = draft_blocks(self.config, token_ids, anchors, self.table)
        rotation = repeated(self.table, len(token_ids))
        with autocast(self.device):
            drafts: Tensor = self._pass(self.config, self.tensors, passed.taps, rotation, blocks)
        return drafts, teacher
