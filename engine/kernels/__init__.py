"""The op table: name → definition, implementations, cases, cost and tolerance.

Everything the engine runs on an accelerator by its own kernel is listed here. Implementations
are chosen by name and nothing falls back to another one silently.
"""

from __future__ import annotations

from typing import Any

from engine.kernels.add_norm import OP as _ADD_NORM
from engine.kernels.add_norm import AddNormCase, add_norm
from engine.kernels.attend_window import OP as _ATTEND_WINDOW
from engine.kernels.attend_window import AttendWindowCase, attend_window
from engine.kernels.choose_experts import OP as _CHOOSE_EXPERTS
from engine.kernels.choose_experts import Choice, ChooseExpertsCase, choose_experts
from engine.kernels.draft_tree import OP as _DRAFT_TREE
from engine.kernels.draft_tree import DraftTreeCase, Trees, draft_tree
from engine.kernels.greedy_tokens import OP as _GREEDY_TOKENS
from engine.kernels.greedy_tokens import Greedy, GreedyTokensCase, greedy_tokens
from engine.kernels.grouped_experts import OP as _GROUPED_EXPERTS
from engine.kernels.grouped_experts import (
    GroupedExpertsCase,
    experts_programs,
    experts_workspace_size,
    grouped_experts,
)
from engine.kernels.head_rows import OP as _HEAD_ROWS
from engine.kernels.head_rows import HeadRowsCase, head_rows
from engine.kernels.keep_rows import OP as _KEEP_ROWS
from engine.kernels.keep_rows import KeepRowsCase, keep_rows
from engine.kernels.likeliest_tokens import OP as _LIKELIEST_TOKENS
from engine.kernels.likeliest_tokens import (
    Candidates,
    LikeliestTokensCase,
    likeliest_tokens,
)
from engine.kernels.mla_rows import OP as _MLA_ROWS
from engine.kernels.mla_rows import MlaRowsCase, mla_rows
from engine.kernels.op import Binary, Case, Cost, Kernel, Op, Tolerance
from engine.kernels.skinny_linear import OP as _SKINNY_LINEAR
from engine.kernels.skinny_linear import SkinnyLinearCase, skinny_linear
from engine.kernels.tree_attention import OP as _TREE_ATTENTION
from engine.kernels.tree_attention import (
    TreeAttentionCase,
    default_num_splits,
    launched_programs,
    tree_attention,
    workspace_size,
)
from engine.kernels.tree_attention.fp8_rows import dequantize_rows, fp8_row_bytes, quantize_rows
from engine.kernels.tree_attention.ladder import ladder_attention, ladder_programs
from engine.kernels.tree_walk import OP as _WALK_TREE
from engine.kernels.tree_walk import Walk, WalkTreeCase, walk_tree

OPS: dict[str, Op[Any]] = {
    op.name: op
    for op in (
        _TREE_ATTENTION,
        _GROUPED_EXPERTS,
        _CHOOSE_EXPERTS,
        _MLA_ROWS,
        _SKINNY_LINEAR,
        _ADD_NORM,
        _KEEP_ROWS,
        _HEAD_ROWS,
        _ATTEND_WINDOW,
        _LIKELIEST_TOKENS,
        _DRAFT_TREE,
        _GREEDY_TOKENS,
        _WALK_TREE,
    )
}

__all__ = [
    "OPS",
    "AddNormCase",
    "AttendWindowCase",
    "Binary",
    "Candidates",
    "Case",
    "Choice",
    "ChooseExpertsCase",
    "Cost",
    "DraftTreeCase",
    "Greedy",
    "GreedyTokensCase",
    "GroupedExpertsCase",
    "HeadRowsCase",
    "KeepRowsCase",
    "Kernel",
    "LikeliestTokensCase",
    "MlaRowsCase",
    "Op",
    "SkinnyLinearCase",
    "Tolerance",
    "TreeAttentionCase",
    "Trees",
    "Walk",
    "WalkTreeCase",
    "add_norm",
    "attend_window",
    "choose_experts",
    "default_num_splits",
    "dequantize_rows",
    "draft_tree",
    "experts_programs",
    "experts_workspace_size",
    "fp8_row_bytes",
    "greedy_tokens",
    "grouped_experts",
    "head_rows",
    "keep_rows",
    "ladder_attention",
    "ladder_programs",
    "launched_programs",
    "likeliest_tokens",
    "mla_rows",
    "quantize_rows",
    "skinny_linear",
    "tree_attention",
    "walk_tree",
    "workspace_size",
]
