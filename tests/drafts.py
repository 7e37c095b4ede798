"""A small drafter in float64, taps for it, and what it is asked."""

import dataclasses

import torch

from engine.drafter import DraftRequest
from engine.presets import preset, random_drafter

NANO = preset("nano", dtype=torch.float64, seed=3)


def variant(**changes):
    """A drafter of another configuration, with weights of its own."""
    return random_drafter(dataclasses.replace(NANO.drafter.config, **changes), NANO.target, seed=3)


def random_taps(count, drafter=NANO.drafter, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, drafter.fc.shape[1], generator=generator, dtype=torch.float64)


def request(*roots):
    return DraftRequest(roots, (0,) * len(roots), tuple(range(len(roots))))
