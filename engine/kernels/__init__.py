"""The op table: name → definition, implementations, cases, cost and tolerance.

Everything the engine runs on an accelerator by its own kernel is listed here. Implementations
are chosen by name and nothing falls back to another one silently.
"""

from __future__ import annotations

from typing import Any

from engine.kernels.choose_experts import OP as _CHOOSE_EXPERTS
from engine.kernels.choose_experts import Choice, ChooseExpertsCase, choose_experts
from engine.kernels.grouped_experts import OP as _GROUPED_EXPERTS
from engine.kernels.grouped_experts import (
    GroupedExpertsCase,
    experts_programs,
    experts_workspace_size,
    grouped_experts,
)
from engine.kernels.mla_rows import OP as _MLA_ROWS
from engine.kernels.mla_rows import MlaRowsCase, mla_rows
from engine.kernels.op import Binary, Case, Cost, Kernel, Op, Tolerance
from engine.kernels.tree_attention import OP as _TREE_ATTENTION
from engine.kernels.tree_attention import (
    TreeAttentionCase,
    default_num_splits,
    launched_programs,
    tree_attention,
    workspace_size,
)
from engine.kernels.tree_attention.ladder import ladder_attention, ladder_programs

OPS: dict[str, Op[Any]] = {
    op.name: op for op in (_TREE_ATTENTION, _GROUPED_EXPERTS, _CHOOSE_EXPERTS, _MLA_ROWS)
}

__all__ = [
    "OPS",
    "Binary",
    "Case",
    "Choice",
    "ChooseExpertsCase",
    "Cost",
    "GroupedExpertsCase",
    "Kernel",
    "MlaRowsCase",
    "Op",
    "Tolerance",
    "TreeAttentionCase",
    "choose_experts",
    "default_num_splits",
    "experts_programs",
    "experts_workspace_size",
    "grouped_experts",
    "ladder_attention",
    "ladder_programs",
    "launched_programs",
    "mla_rows",
    "tree_attention",
    "workspace_size",
]
