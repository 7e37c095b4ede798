"""Byte tokens and draft trees as text for a terminal."""

import codecs
from collections.abc import Sequence

from engine.draft_tree import DraftTree
from engine.trace import StepRecord

NUM_BYTES = 256  # tokens from here on are special
SHOWN_NODES = 12  # of each tree; the rest is counted


class TextStream:
    """Turns byte tokens into text as they come; a character waits for its last byte."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, token_ids: Sequence[int]) -> str:
        """Return the text that `token_ids` complete; special tokens have none."""
        return self._decoder.decode(bytes(t for t in token_ids if t < NUM_BYTES))

    def close(self) -> str:
        """Return what stands for bytes that never became a character."""
        return self._decoder.decode(b"", final=True)


def quoted(token_ids: Sequence[int]) -> str:
    """Show bytes as a quoted string and special tokens as <number>."""
    parts = [bytes([t]).decode("latin-1") if t < NUM_BYTES else f"<{t}>" for t in token_ids]
    return repr("".join(parts))


def tree_lines(record: StepRecord) -> list[str]:
    """Draw a step's tree as indented lines, children below their parent, accepted nodes marked."""
    tree, kept = record.tree, {0, *record.accepted}
    lines = [f"step {record.step}: {tree.num_nodes} nodes, commit length {len(record.appended)}"]
    for node in _preorder(tree)[: SHOWN_NODES + 1]:
        mark = "*" if node in kept else " "
        token = quoted([int(tree.token_ids[node])])
        probability = float(tree.path_log_probs[node].exp())
        indent = "  " * int(tree.depths[node])
        lines.append(f"  {mark} {indent}{token}  p={probability:.3f} node {node}")
    if tree.num_nodes > SHOWN_NODES:
        lines.append(f"    ... {tree.num_nodes - SHOWN_NODES} more")
    return [*lines, f"  appended {quoted(record.appended)}"]


def _preorder(tree: DraftTree) -> list[int]:
    parents = tree.parents.tolist()
    order: list[int] = []
    stack = [0]
    while stack:
        node = stack.pop()
        order.append(node)
        stack += [child for child in reversed(range(len(parents))) if parents[child] == node]
    return order
