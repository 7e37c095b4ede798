"""The target's training: cross-entropy of the next byte, experts balanced by the router's bias.

Weights are float32 while they are trained and bfloat16 once saved; on CUDA the passes run under
bfloat16 autocast.
"""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from engine.checkpoints.tiny.batches import windows
from engine.checkpoints.tiny.model import TargetPass, target_pass
from engine.config import TargetConfig
from engine.layers import Rotary, Rotation
from engine.target import Shape, Target, target_shapes
from engine.weights import save_target

BIAS = "e_score_correction_bias"
BIAS_RATE = 1e-3  # by which the router's bias moves in a step
HELD_OUT_WINDOWS = 3  # of each text
EMBEDDING_SPREAD, HEAD_SPREAD = 0.5, 0.02  # of weights at the start

Compile = Callable[[Callable[..., Any]], Callable[..., Any]]


class TargetRunner:
    """Runs target passes over batches of sequences of one length."""

    def __init__(
        self, config: TargetConfig, tensors: Mapping[str, Tensor], compile_pass: Compile
    ) -> None:
        self.config = config
        self.tensors = dict(tensors)
        self.device = self.tensors["lm_head.weight"].device
        self.table = self.rotations(1)
        self._pass = compile_pass(target_pass)

    def rotations(self, num_positions: int) -> Rotation:
        """Return the rotation of the first positions."""
        positions = torch.arange(num_positions, device=self.device)
        return Rotary.of_target(self.config, self.device).at(positions, torch.float32)

    def __call__(self, token_ids: Tensor, tap_ids: tuple[int, ...] = ()) -> TargetPass:
        """Run the target over `token_ids` [B, S]."""
        B, S = token_ids.shape
        if len(self.table.cos) != S:
            self.table = self.rotations(S)
        rotation = repeated(self.table, B)
        with autocast(self.device):
            passed: TargetPass = self._pass(self.config, self.tensors, token_ids, rotation, tap_ids)
        return passed


class TargetTask:
    """A target to train."""

    def __init__(
        self,
        target: Target,
        out: Path,
        texts: Mapping[str, bytes],
        compile_pass: Compile,
    ) -> None:
        self.config, self.out, self.texts = target.config, out, texts
        tensors = {name: tensor.float().clone() for name, tensor in target.tensors.items()}
        self.parameters = trainable({n: t for n, t in tensors.items() if not n.endswith(BIAS)})
        self.biases = [tensor for name, tensor in tensors.items() if name.endswith(BIAS)]
        self.run = TargetRunner(target.config, tensors, compile_pass)
        self.length = 0
        self.loads = torch.empty(0)

    def begin(self, length: int) -> None:
        """Prepare for sequences of `length` bytes."""
        self.length = length

    def loss(self, token_ids: Tensor) -> Tensor:
        """Return the mean cross-entropy of `token_ids` [B, length + 1], in nats for each byte."""
        passed = self.run(token_ids[:, :-1])
        self.loads = passed.loads
        return functional.cross_entropy(passed.logits.flatten(0, 1), token_ids[:, 1:].flatten())

    @torch.no_grad()
    def after_step(self, rate: float) -> None:
        """Move the router's bias towards experts that got less than their share.

        Source: arXiv 2412.19437 section 2.1.2.
        """
        for bias, load in zip(self.biases, self.loads, strict=True):
            bias.add_((1.0 / len(bias) - load).sign(), alpha=BIAS_RATE * rate)

    def save(self) -> None:
        """Write the target as it is now."""
        save_target(Target(self.config, rounded(self.run.tensors)), self.out)

    @torch.no_grad()
    def report(self) -> str:
        """Give the bits for each byte of the held-out texts, and the busiest expert's load."""
        parts = []
        for name, text in self.texts.items():
            token_ids = windows(text, self.length + 1, HELD_OUT_WINDOWS).to(self.run.device)
            bits = self.loss(token_ids).item() / math.log(2.0)
            parts.append(f"{name} {bits:.3f} bits/byte")
        busiest = self.loads.max().item() * self.config.n_routed_experts
        return ", ".join([*parts, f"busiest expert {busiest:.2f} of its share"])


def initial_target(config: TargetConfig, device: torch.device, seed: int) -> Target:
    """Make a target to start from, float32; layers add little to the residual stream at first."""
    generator = torch.Generator().manual_seed(seed)
    residual = 1.0 / math.sqrt(2.0 * config.num_hidden_layers)
    tensors = initial_tensors(target_shapes(config), generator, residual)
    tensors["model.embed_tokens.weight"] *= EMBEDDING_SPREAD
    tensors["lm_head.weight"] *= HEAD_SPREAD * math.sqrt(config.hidden_size)
    return Target(config, {name: tensor.to(device) for name, tensor in tensors.items()})


def initial_tensors(
    shapes: Mapping[str, Shape], generator: torch.Generator, residual: float
) -> dict[str, Tensor]:
    """Draw matrices that keep the size of what they map, `residual` times it where they add."""
    tensors = {}
    for name, shape in shapes.items():
        if len(shape) == 1:
            tensors[name] = torch.zeros(shape) if name.endswith(BIAS) else torch.ones(shape)
            continue
        spread = 1.0 if name.endswith("embed_tokens.weight") else shape[-1] ** -0.5
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            spread *= residual
        tensors[name] = torch.randn(shape, generator=generator) * spread
    return tensors


def trainable(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Ask for gradients of `tensors`, which must be leaves."""
    return {name: tensor.requires_grad_() for name, tensor in tensors.items()}


def rounded(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return `tensors` in bfloat16, the router's bias in float32."""
    return {
        name: tensor.detach().clone() if name.endswith(BIAS) else tensor.detach().bfloat16()
        for name, tensor in tensors.items()
    }


def repeated(table: Rotation, num_seqs: int) -> Rotation:
    """Return the rotation of the packed rows of `num_seqs` sequences that `table` covers."""
    return Rotation(table.cos.repeat(num_seqs, 1), table.sin.repeat(num_seqs, 1))


def autocast(device: torch.device) -> torch.autocast:
    """Compute in bfloat16 on CUDA and as the tensors are elsewhere."""
    return torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda")
