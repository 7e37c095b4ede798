"""Byte tokens and draft trees as text for a terminal."""

import codecs
from collections.abc import Sequence
from itertools import groupby

from engine.draft_tree import DraftTree
from engine.presets import NUM_BYTES
from engine.trace import StepRecord

SHOWN_NODES = 12  # likeliest of each tree, shown beside the accepted ones; the rest is counted


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
    r"""Show bytes as quoted text, \xNN where they are no characters, and specials as <number>."""
    parts = []
    for is_byte, group in groupby(token_ids, key=lambda token: token < NUM_BYTES):
        run = list(group)
        parts.append(_escaped(bytes(run)) if is_byte else "".join(f"<{token}>" for token in run))
    return f"'{''.join(parts)}'"


def _escaped(text: bytes) -> str:
    characters = text.replace(b"\\", rb"\\").decode("utf-8", errors="backslashreplace")
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape").decode() for c in characters
    )


def tree_lines(record: StepRecord) -> list[str]:
    """Draw a step's tree as indented lines, children below their parent, accepted nodes marked."""
    tree, kept = record.tree, {0, *record.accepted}
    lines = [f"step {record.step}: {tree.num_nodes} nodes, commit length {len(record.appended)}"]
    # Ids are the order of choice, so the first ones are a tree, and so they are with the path.
    shown = [node for node in _preorder(tree) if node <= SHOWN_NODES or node in kept]
    for node in shown:
        mark = "*" if node in kept else " "
        token = quoted([int(tree.token_ids[node])])
        probability = float(tree.path_log_probs[node].exp())
        indent = "  " * int(tree.depths[node])
        lines.append(f"  {mark} {indent}{token}  p={probability:.3f} node {node}")
    if hidden := 1 + tree.num_nodes - len(shown):
        lines.append(f"    ... {hidden} more")
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
