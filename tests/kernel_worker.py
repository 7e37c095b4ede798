"""The process that times one checkout's kernels for `tests.kernel_times`.

Its `engine` is the checkout's, all else is of the folder this file is in: who calls puts a link to
that engine first on the path. It answers questions as `benchmarks/_side.py` has them. With the
argument `launch` it calls one implementation once, inside what a profiler is told to look at.
"""

import gc
import json
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import engine
from benchmarks import _side
from benchmarks._ceilings import measure_ceilings
from benchmarks._interleaved import Contestant, Instruments, measure
from benchmarks._meters import identify
from benchmarks._peer_cells import PeerCell
from benchmarks._peer_inputs import OP as ATTENTION
from benchmarks._peer_inputs import build_inputs
from benchmarks._peer_trial import DEVICE, DTYPE
from benchmarks._peers import CALL_ERRORS, PeerRefusedError, _one_line, _recorded, check
from benchmarks._provenance import provenance_of
from engine.kernels import OPS, Cost


@dataclass(frozen=True)
class Problem:
    """One call of an op, what must come out, and what it costs at least."""

    arguments: dict[str, Any]
    expected: Tensor
    cost: Cost


def attention(cell: dict[str, Any], *, is_fp8: bool) -> Problem:
    """Build a cell of the peers' suites, over plain rows or over fp8 ones."""
    inputs = build_inputs(PeerCell(**cell), device=DEVICE, dtype=DTYPE)
    if not is_fp8:
        return Problem(inputs.arguments, inputs.expected("tree"), inputs.cost("tree"))
    from engine.kernels import dequantize_rows  # noqa: PLC0415 - older engines have plain rows alone

    case = replace(inputs.case, is_fp8=True)
    arguments = ATTENTION.inputs(case, device=DEVICE, dtype=DTYPE)
    numbers = dequantize_rows(arguments["kv_pages"], case.value_dim, torch.float32)
    exact = replace(inputs, case=case, arguments=arguments | {"kv_pages": numbers})
    return Problem(arguments, exact.expected("tree"), exact.cost("tree"))


def experts(cell: int, *, is_fp8: bool) -> Problem:
    """Build the routed experts of the layer that `moe.MoeLayer` times, for so many tokens."""
    del is_fp8  # rows of a cache; there are none
    from benchmarks import moe  # noqa: PLC0415 - older engines lack what it needs

    layer = moe.rank_layer(moe.RANK, DEVICE) if DEVICE == "cuda" else moe.pair_layer()
    x = moe.random_rows(cell, layer)
    operands = moe.routed_operands(layer, x)
    expected = OPS["grouped_experts"].reference(**operands).float()
    return Problem(operands, expected, moe.routed_cost(layer, x))


PROBLEMS = {"tree_attention": attention, "grouped_experts": experts}


def call_of(op: str, name: str, problem: Problem) -> Callable[[], Tensor]:
    """Return the call that is timed; it gives the op's first result."""
    call = partial(OPS[op].implementations[name], **problem.arguments)

    def first() -> Tensor:
        found = call()
        return found[0] if isinstance(found, tuple) else found

    return first


def synchronize() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


class Kernels(_side.Server):
    """A cell that is open, and its implementations, each found to be right."""

    racing: list[Contestant] = []  # noqa: RUF012 - of nobody until a cell is open
    problem: Problem
    instruments: Instruments

    def do_about(self) -> dict[str, Any]:
        """Say whose engine this is, what it runs on and with which compilers."""
        folder = Path(str(engine.__file__)).resolve().parent
        known = asdict(identify(DEVICE).device)
        with suppress(PackageNotFoundError):
            known["runtime"] += f", NVRTC {version('nvidia-cuda-nvrtc')}"
        return {"folder": str(folder), "device": known, **asdict(provenance_of(folder))}

    def do_open(self, op: str, cell: Any, names: list[str], is_fp8: bool) -> dict[str, Any]:
        """Build a cell; tell of each implementation how far it errs, or why it is not timed."""
        self.racing = []
        gc.collect()
        self.problem = PROBLEMS[op](cell, is_fp8=is_fp8)
        known: dict[str, dict[str, Any]] = {}
        for name in names:
            try:
                body, result = _recorded(
                    call_of(op, name, self.problem), self.problem.expected.device
                )
                known[name] = {"error_rel": check(name, result, self.problem.expected)}
            except PeerRefusedError as refused:
                known[name] = {"absent": str(refused)}
            except CALL_ERRORS as error:
                known[name] = {"absent": f"{name}: {_one_line(error)}"}
            else:
                self.racing.append(Contestant(name, body))
        self.instruments = Instruments.of(self.racing, DEVICE)
        return known

    def do_floor(self) -> dict[str, Any]:
        """Say how long the open cell takes at least, at rates that are measured here."""
        from benchmarks._rank_table import floor_s  # noqa: PLC0415 - asked of the newest engine

        cost, ceilings = self.problem.cost, measure_ceilings()
        return {"floor_s": floor_s(cost, ceilings), **asdict(cost), **asdict(ceilings)}

    def do_take(self, count: int) -> dict[str, Any]:
        """Time each implementation so often; runs that are not counted come first."""
        samples_s = measure(
            self.racing, device=DEVICE, num_rounds=count, instruments=self.instruments
        )
        codes = {name: clock.validity() for name, clock in self.instruments.clocks.items()}
        return {"samples_s": samples_s, "validity": codes}


def launch(told: dict[str, Any]) -> None:
    """Call an implementation once where a profiler looks, after what compiles and loads it."""
    problem = PROBLEMS[told["op"]](told["cell"], is_fp8=told["is_fp8"])
    call = call_of(told["op"], told["name"], problem)
    call()
    synchronize()
    with torch.cuda.profiler.profile():
        call()
        synchronize()


if __name__ == "__main__":
    if DEVICE == "cpu":
        torch.set_num_threads(1)  # as in the suites
    if sys.argv[1:2] == ["launch"]:
        launch(json.loads(sys.argv[2]))
    else:
        _side.main(Kernels)
