"""Who is compared, and how each is made ready: loaded, refused, built, captured, checked.

A contestant is timed only if what it returns agrees with the op's definition under its own mask,
within the op's tolerance. One that cannot take a cell, fails in it or returns something else is
refused with one line. The mask is the tree's, except for peers that know chains only: they get a
causal chain of the same size, which moves the same bytes.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor
from triton import TritonError

from benchmarks import _peer_libraries as libraries
from benchmarks._peer_cells import OURS, PeerCell, mask_of
from benchmarks._peer_fa3 import fa3_cascade, fa3_chain
from benchmarks._peer_flashinfer import flashinfer_cascade, flashinfer_chain
from benchmarks._peer_flashmla import PAGE_SIZE as FLASHMLA_PAGE_SIZE
from benchmarks._peer_flashmla import flashmla_chain
from benchmarks._peer_inputs import OP, PeerInputs
from benchmarks._peer_libraries import PeerMissingError
from benchmarks._peer_triton import PAGE_MULTIPLE, sglang_tree, vllm_chain
from benchmarks._sidecar import CaseFacts
from benchmarks._timing import captured
from engine.errors import EngineError
from engine.kernels import launched_programs

# What an implementation or its build raises where it cannot do what it is asked to.
CALL_ERRORS: Final = (
    *(ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, OSError),
    *(RuntimeError, TypeError, ValueError, TritonError, EngineError),
)


class PeerRefusedError(Exception):
    """An implementation is not measured in a cell; the message is the one line that says why."""


@dataclass(frozen=True, slots=True)
class Peer:
    """A stock implementation."""

    load: Callable[[], Any]  # its library; PeerMissingError where there is none
    prepare: Callable[[Any, PeerInputs], Callable[[], Tensor]]  # the call that is timed
    takes_pages: Callable[[int], bool] = lambda _page_size: True
    pages: str = "any"  # the page sizes it takes, in words


PEERS: Final[Mapping[str, Peer]] = {
    "sglang_triton": Peer(libraries.load_sglang_extend, sglang_tree),
    "fa3_cascade": Peer(libraries.load_fa3, fa3_cascade),
    "flashinfer_fa3_cascade": Peer(
        libraries.load_flashinfer_mla, partial(flashinfer_cascade, backend="fa3")
    ),
    "flashmla": Peer(
        libraries.load_flash_mla,
        flashmla_chain,
        takes_pages=lambda page_size: page_size == FLASHMLA_PAGE_SIZE,
        pages=f"of {FLASHMLA_PAGE_SIZE} rows",
    ),
    "fa3": Peer(libraries.load_fa3, fa3_chain),
    "flashinfer_fa3": Peer(libraries.load_flashinfer_mla, partial(flashinfer_chain, backend="fa3")),
    "flashinfer_fa2": Peer(libraries.load_flashinfer_mla, partial(flashinfer_chain, backend="fa2")),
    "vllm_triton": Peer(
        libraries.load_vllm_decode,
        vllm_chain,
        takes_pages=lambda page_size: page_size % PAGE_MULTIPLE == 0,
        pages=f"of a multiple of {PAGE_MULTIPLE} rows",
    ),
}


@dataclass(frozen=True, slots=True)
class Entrant:
    """An implementation that is ready to be timed in a cell, and right."""

    name: str
    body: Callable[[], object]  # a captured graph's replay on CUDA
    facts: CaseFacts
    error_rel: float  # largest ‖out - expected‖ / ‖expected‖ of an output row


def obstacle(name: str, cell: PeerCell) -> str | None:
    """Say why an implementation cannot take a cell whatever is installed; None if it can."""
    if name in OURS or PEERS[name].takes_pages(cell.page_size):
        return None
    return f"{name}: takes pages {PEERS[name].pages}, not of {cell.page_size}"


def enter(name: str, inputs: PeerInputs, expected: Tensor) -> Entrant:
    """Make an implementation ready for a cell.

    Parameters
    ----------
    name : one of IMPLEMENTATIONS
    inputs : the cell's operands
    expected : [N, T, H, V] float32, the result under the implementation's mask

    Raises
    ------
    PeerRefusedError
        It is not installed, cannot take the cell, fails, or computes something else.
    """
    reason = obstacle(name, inputs.cell)
    if reason is not None:
        raise PeerRefusedError(reason)
    try:
        body, result = _recorded(_call(name, inputs), inputs.q.device)
    except PeerMissingError as missing:
        raise PeerRefusedError(f"{name}: not installed ({missing})") from missing
    except CALL_ERRORS as error:
        raise PeerRefusedError(f"{name}: {_one_line(error)}") from error
    error_rel = check(name, result, expected)
    return Entrant(name, body, _facts(name, inputs), error_rel)


def check(name: str, result: Tensor, expected: Tensor) -> float:
    """Return the largest relative error of a row; refuse what is not the expected attention."""
    if result.shape != expected.shape:
        raise PeerRefusedError(
            f"{name}: wrong result: expected shape {list(expected.shape)}, got {list(result.shape)}"
        )
    distance = (result.float() - expected).norm(dim=-1) / expected.norm(dim=-1)
    error_rel = float(distance.nan_to_num(nan=torch.inf).max())
    allowed = OP.tolerance(result.dtype).output_rel
    if error_rel > allowed:
        raise PeerRefusedError(
            f"{name}: wrong result: expected rows within {allowed:g} of the definition, "
            f"got {error_rel:.3g} (‖out - expected‖ / ‖expected‖)"
        )
    return error_rel


def _call(name: str, inputs: PeerInputs) -> Callable[[], Tensor]:
    """Return the call that is timed; makes plans and metadata."""
    if name not in OURS:
        peer = PEERS[name]
        return peer.prepare(peer.load(), inputs)
    if name not in OP.implementations:
        raise PeerMissingError(f"expected a backend of tree_attention, got {name!r}")
    ours = partial(OP.implementations[name], **inputs.arguments)
    return lambda: ours()[0]


def _recorded(
    call: Callable[[], Tensor], device: torch.device
) -> tuple[Callable[[], object], Tensor]:
    """Return the body to be timed and what it wrote when it ran once more than the warm-up."""
    results: list[Tensor] = []

    def keep() -> None:
        results[:] = [call()]

    if device.type != "cuda":
        keep()
        return call, results[0]
    torch.cuda.synchronize()  # the operands were made on another stream than the warm-up's
    replay = captured(keep)
    results[0].zero_()  # what the replay does not write must not count
    replay()
    torch.cuda.synchronize()
    return replay, results[0]


def _facts(name: str, inputs: PeerInputs) -> CaseFacts:
    """Say what the cell must move and compute under the implementation's mask."""
    cost = inputs.cost(mask_of(name))
    programs = None
    if name in OURS:
        programs = launched_programs(**inputs.arguments, backend=name)
    return CaseFacts(
        context_tokens=inputs.cell.context_tokens,
        bytes=cost.bytes,
        kv_bytes=cost.kv_bytes,
        flops=cost.flops,
        programs=programs,
    )


def _one_line(error: BaseException) -> str:
    """Return an error's type and the first line of its message that says anything."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"[:300]
