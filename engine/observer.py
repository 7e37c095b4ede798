"""Telling an observer when the stages of a step begin and end; the engine itself has no clock."""

from collections.abc import Callable
from functools import wraps
from typing import Concatenate, ParamSpec, Protocol, TypeVar

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
