"""The definition of routed experts: a choice, and grouped experts of it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from engine.kernels.choose_experts.reference import run as choose
from engine.kernels.grouped_experts.reference import run as run_experts

if TYPE_CHECKING:
    from engine.kernels.routed_experts.problem import Problem


def run(problem: Problem) -> None:
    """Write the choice and what the experts make of it."""
    choose(problem.choosing)
    run_experts(problem.experts)
