"""The variants of the ladder as calls that are ready to be timed, each checked before."""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch

from benchmarks._device import DEVICE
from benchmarks._interleaved import Absent, Contestant
from benchmarks._sidecar import CaseFacts
from benchmarks._timing import captured
from benchmarks.attention import NUM_HEADS, TREE
from engine.kernels import OPS, TreeAttentionCase, ladder_attention, ladder_programs

OP: Final = OPS["tree_attention"]
SLOW_LAYOUT: Final = (1, False)  # page size, pages in order
INTERPRETER_VARIABLE: Final = "TRITON_INTERPRET"
SWITCHES: Final = ("read_once", "split", "packed")
# Triton's interpreter multiplies no bfloat16.
DTYPE: Final = torch.bfloat16 if DEVICE == "cuda" else torch.float32

Arguments = Mapping[str, Any]
Result = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True, slots=True)
class Problem:
    """What all variants of a context compute: the same rows, wherever they lie."""

    context_tokens: int
    value_dim: int
    rope_dim: int

    def case(self, page_size: int) -> TreeAttentionCase:
        """Return the op's case; queries and rows do not depend on the page size."""
        return TreeAttentionCase(
            name="ladder",
            reason="one layer of a TP8 rank's verify pass",
            context_lens=(self.context_tokens,),
            trees=(TREE,),
            num_heads=NUM_HEADS,
            value_dim=self.value_dim,
            rope_dim=self.rope_dim,
            page_size=page_size,
        )

    def arguments(self, page_size: int, in_order: bool) -> Arguments:
        """Build the operands in one layout."""
        shuffled = OP.inputs(self.case(page_size), device=DEVICE, dtype=DTYPE)
        return _in_order(shuffled) if in_order else shuffled


def rungs(problem: Problem, variants: Iterable[str]) -> list[Contestant | Absent]:
    """Return a contestant for each variant; one whose result is wrong is absent.

    Raises
    ------
    NotImplementedError
        No Triton kernel can run here.
    """
    if DEVICE == "cpu" and os.environ.get(INTERPRETER_VARIABLE) != "1":
        raise NotImplementedError(
            f"the ladder: expected a CUDA device or {INTERPRETER_VARIABLE}=1, got neither "
            "(its kernels are Triton's)"
        )
    layouts: dict[tuple[int, bool], Arguments] = {SLOW_LAYOUT: problem.arguments(*SLOW_LAYOUT)}
    expected = OP.reference(**_exact(layouts[SLOW_LAYOUT]))
    found: list[Contestant | Absent] = []
    for variant in variants:
        factors = variant.split("+")
        layout = (64 if "page_64" in factors else 1, "in_order" in factors)
        if layout not in layouts:
            layouts[layout] = problem.arguments(*layout)
        options: dict[str, Any] = {name: name in factors for name in SWITCHES}
        options["num_splits"] = _num_splits(layouts[SLOW_LAYOUT], options)
        call = partial(ladder_attention, **layouts[layout], **options)
        fault = _fault(call(), expected)
        if fault is not None:
            found.append(Absent(variant, fault, is_failure=True))
            continue
        programs = ladder_programs(**layouts[layout], **options)
        found.append(_contestant(variant, call, problem, layout[0], programs))
    return found


def _contestant(
    variant: str, call: "partial[Result]", problem: Problem, page_size: int, programs: int
) -> Contestant:
    cost = OP.cost(problem.case(page_size), itemsize=DTYPE.itemsize)
    facts = CaseFacts(
        context_tokens=problem.context_tokens,
        bytes=cost.bytes,
        kv_bytes=cost.kv_bytes,
        flops=cost.flops,
        programs=programs,
    )
    return Contestant(variant, captured(call) if DEVICE == "cuda" else call, facts)


def _num_splits(arguments: Arguments, switches: Mapping[str, Any]) -> int | None:
    """Return the default number of splits in one layout, for use in all of them.

    It follows the capacity of the page table, which pages round up: no factor may move another.
    """
    if not switches["split"]:
        return None
    one: dict[str, Any] = {**switches, "split": False}
    return ladder_programs(**arguments, **switches) // ladder_programs(**arguments, **one)


def _fault(actual: Result, expected: Result) -> str | None:
    """Say how a result differs from the expected one by more than its dtype explains."""
    tolerance = OP.tolerance(DTYPE)
    (out, lse), (want_out, want_lse) = actual, expected
    error_rel = float(((out.float() - want_out).norm(dim=-1) / want_out.norm(dim=-1)).max())
    error_lse = float((lse - want_lse).abs().max())
    if error_rel <= tolerance.output_rel and error_lse <= tolerance.lse_abs:
        return None
    return (
        f"result: expected within {tolerance.output_rel} and {tolerance.lse_abs} (lse) of the "
        f"reference, got {error_rel:.3g} and {error_lse:.3g}"
    )


def _exact(arguments: Arguments) -> dict[str, Any]:
    """Return the operands in float32."""
    rows = {name: arguments[name].float() for name in ("q", "kv_pages")}
    return {**arguments, **rows}


def _in_order(arguments: Arguments) -> dict[str, Any]:
    """Lay the pages of the one sequence down in the order of their positions."""
    table, pages = arguments["page_table"].clone(), arguments["kv_pages"]
    rows = int(arguments["context_lens"][0] + arguments["tree_sizes"][0])
    count = -(-rows // pages.shape[1])
    held = pages[table[0, :count].long()]
    table[0, :count] = torch.arange(count, dtype=table.dtype)
    return {**arguments, "kv_pages": held, "page_table": table}
