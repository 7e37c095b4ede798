"""The training loop: phases of one sequence length each, one learning-rate schedule over all.

A phase lasts a number of steps, or minutes; the minutes begin when its first steps, which compile
and tune, are done. What is trained is a `Task`; this module knows nothing about models.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from engine.checkpoints.tiny.batches import Corpus, draw_places

UNTIMED_STEPS = 3
PRINT_EVERY, SAVE_EVERY = 50, 1000  # steps
WARM_UP = 0.02  # of the whole schedule
LEAST_RATE = 0.03  # of the peak, at the end
WEIGHT_DECAY = 0.1  # of matrices, these excepted
NOT_DECAYED = ("embed_tokens.weight", "lm_head.weight")
GRADIENT_NORM = 1.0


class Task(Protocol):
    """Something to train."""

    parameters: Mapping[str, Tensor]  # leaves that require gradients

    def begin(self, length: int) -> None:
        """Prepare for sequences of `length` bytes."""

    def loss(self, token_ids: Tensor) -> Tensor:
        """Return the loss of `token_ids` [B, length + 1]."""

    def after_step(self, rate: float) -> None:
        """Do what is no gradient's business; `rate` is the learning rate over its peak."""

    def save(self) -> None:
        """Write the checkpoint as it is now."""

    def report(self) -> str:
        """Say how good it is on the held-out texts."""


@dataclass(frozen=True, slots=True)
class Phase:
    """Sequences of one length, for `steps` steps, or for `minutes` where that is None."""

    length: int
    minutes: float
    steps: int | None = None

    @property
    def budget(self) -> float:
        """Steps or minutes; all phases of a run count the same."""
        return self.minutes if self.steps is None else float(self.steps)


@dataclass(frozen=True, slots=True)
class Settings:
    """How a task is fitted."""

    learning_rate: float
    batch_tokens: int
    seed: int


def fit(task: Task, corpus: Corpus, phases: Sequence[Phase], settings: Settings) -> None:
    """Train `task` through all phases, saving it after each."""
    optimizer = _optimizer(task.parameters, settings.learning_rate)
    rng = np.random.default_rng(settings.seed)
    total, done = sum(phase.budget for phase in phases), 0.0
    for phase in (phase for phase in phases if phase.budget > 0.0):
        task.begin(phase.length)
        run = _Run(phase, settings, before=done / total, share=phase.budget / total)
        run.train(task, corpus, optimizer, rng)
        done += phase.budget
        task.save()
        with torch.compiler.set_stance("force_eager"):  # shapes that are used once
            print(f"length {phase.length}: {task.report()}", flush=True)


@dataclass(slots=True)
class _Run:
    """One phase while it runs."""

    phase: Phase
    settings: Settings
    before: float  # of the whole schedule
    share: float
    step: int = 0
    started_s: float = 0.0

    def train(
        self, task: Task, corpus: Corpus, optimizer: torch.optim.Optimizer, rng: np.random.Generator
    ) -> None:
        shape = (max(1, self.settings.batch_tokens // self.phase.length), self.phase.length + 1)
        while (fraction := self._fraction(corpus.stream)) < 1.0:
            rate = learning_rate(self.before + self.share * fraction)
            for group in optimizer.param_groups:
                group["lr"] = rate * self.settings.learning_rate
            loss = task.loss(corpus.tokens(draw_places(corpus.spans, shape, rng)))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(list(task.parameters.values()), GRADIENT_NORM)
            optimizer.step()
            optimizer.zero_grad()
            task.after_step(rate)
            self.step += 1
            if self.step % PRINT_EVERY == 0 or self.step in (1, self.phase.steps):
                self._print(loss.item(), fraction)
            if self.step % SAVE_EVERY == 0:
                task.save()

    def _fraction(self, stream: Tensor) -> float:
        """Return how much of the phase is over."""
        if self.step <= UNTIMED_STEPS:
            if stream.is_cuda:
                torch.cuda.synchronize()
            self.started_s = time.perf_counter()
        if self.phase.steps is not None:
            return self.step / self.phase.steps
        return (time.perf_counter() - self.started_s) / (60.0 * self.phase.minutes)

    def _print(self, loss: float, fraction: float) -> None:
        seconds = time.perf_counter() - self.started_s
        tokens = (self.step - UNTIMED_STEPS) * self.settings.batch_tokens
        speed = f"{tokens / seconds / 1e6:.2f} M tokens/s" if tokens > 0 else "warming up"
        print(f"step {self.step} ({fraction:.0%}): loss {loss:.4f}, {speed}", flush=True)


def learning_rate(progress: float) -> float:
    """Return the learning rate over its peak: a linear warm-up, then a cosine."""
    cosine = 0.5 * (1.0 + math.cos(math.pi * min(1.0, progress)))
    return min(1.0, progress / WARM_UP) * (LEAST_RATE + (1.0 - LEAST_RATE) * cosine)


def _optimizer(parameters: Mapping[str, Tensor], rate: float) -> torch.optim.Optimizer:
    plain, decayed = [], []
    for name, tensor in parameters.items():
        is_matrix = tensor.dim() > 1 and not name.endswith(
            ("embed_tokens.weight", "lm_head.weight")
        )
        (decayed if is_matrix else plain).append(tensor)
    groups = [
        {"params": decayed, "weight_decay": WEIGHT_DECAY},
        {"params": plain, "weight_decay": 0.0},
    ]
    is_cuda = next(iter(parameters.values())).is_cuda
    return torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=is_cuda)
