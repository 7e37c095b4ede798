"""Telling an observer when the stages of a step begin and end; without one there is no clock."""

import time
from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

import torch

from engine.device import wait_for

P = ParamSpec("P")
R = TypeVar("R")

STAGES = ("draft", "build", "verify", "commit")


class StageObserver(Protocol):
    """Told when a stage begins and ends; whether and how time is taken is its own business."""

    def start(self, stage: str) -> None:
        """Begin one of `STAGES`."""

    def stop(self, stage: str) -> None:
        """End the stage that began last, also if it failed."""

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each stage of the step just finished."""


class Observed(Protocol):
    """Something with stages."""

    observer: StageObserver | None


S = TypeVar("S", bound=Observed)


def stage(function: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Make a method tell its object's observer that the stage named like it begins and ends."""

    @wraps(function)
    def observed(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        if self.observer is None:
            return function(self, *args, **kwargs)
        self.observer.start(function.__name__)
        try:
            return function(self, *args, **kwargs)
        finally:
            self.observer.stop(function.__name__)

    return observed


class StageClock:
    """Wall time of each stage of the last step; on CUDA the device is idle at both ends.

    So a stage's time is what it takes alone, and all of them together are more than the step: where
    nobody looks, the host prepares and queues a stage while the device still runs those before it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._started_s = 0.0
        self._seconds: dict[str, float] = {}

    def start(self, stage: str) -> None:
        """Wait for the device and begin the stage."""
        del stage  # the engine names it again when it ends
        wait_for(self._device)
        self._started_s = time.perf_counter()

    def stop(self, stage: str) -> None:
        """Wait for the device and end the stage."""
        wait_for(self._device)
        self._seconds[stage] = time.perf_counter() - self._started_s

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each stage of the step just finished."""
        return dict(self._seconds)
