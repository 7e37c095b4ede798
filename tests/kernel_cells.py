"""Which cells `tests.kernel_times` is asked for: those of the peers' suites, and tokens of experts."""

import re
from dataclasses import asdict

from benchmarks._peer_cells import PAGE_ORDERS, PeerCell
from benchmarks.peers import all_cells
from dashboard.asv_errors import RequestError

LABEL = re.compile(
    rf"(\d+)x(\d+)-c(\d+)-b(\d+)(-uneven)?-p(\d+)-({'|'.join(PAGE_ORDERS)})", re.ASCII
)
DEFAULT_CELLS = {"tree_attention": ["8x9-c65536-b1-p1-shuffled"], "grouped_experts": ["9"]}


def cells_of(op, texts, *, is_fp8=False):
    """Find cells: by label, or of the peers' suites by regular expression; tokens of experts."""
    if op == "grouped_experts":
        if is_fp8:
            raise RequestError("fp8: expected the op tree_attention, got one without cached rows")
        wrong = [text for text in texts if not re.fullmatch("[1-9][0-9]*", text)]
        if wrong:
            raise RequestError(f"cells: expected numbers of tokens, got {wrong[0]!r}")
        return {text: int(text) for text in texts}
    found = {}
    for text in texts:
        cells = [cell_of(text)] if LABEL.fullmatch(text) else _matching(text)
        found |= {cell.label: asdict(cell) for cell in cells}
    if is_fp8 and any(told["page_order"] != "shuffled" for told in found.values()):
        raise RequestError("fp8: expected cells whose pages are shuffled, got one in order")
    return found


def cell_of(label):
    """Read a cell's label."""
    *sizes, uneven, page_size, order = LABEL.fullmatch(label).groups()
    cell = PeerCell(*map(int, (*sizes, page_size)), order, uneven=uneven is not None)
    if cell.label != label:
        raise RequestError(f"cells: expected a label as {cell.label}, got {label}")
    return cell


def _matching(text):
    try:
        cells = [cell for cell in all_cells() if re.search(text, cell.label)]
    except re.error as error:
        raise RequestError(
            f"cells: expected a regular expression, got {text!r} ({error})"
        ) from error
    if not cells:
        raise RequestError(
            f"cells: expected a label or a part of one, got {text!r} (there is none)"
        )
    return cells
