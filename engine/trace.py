"""One JSON object a line for each sequence of each step: what was drafted and what became of it.

::

    {"schema": 1, "mode": "ddtree", "node_budget": 16, ...}           first line: the configuration
    {"step": 1, "sequence": 0, "position": 11, "token_ids": [..], "parents": [-1, ..],
     "depths": [0, ..], "path_log_probs": [0.0, ..], "accepted": [1, 4], "appended": [..],
     "logprobs": [..], "stage_seconds": {"draft": ..} or null}

`position` is the root's; node ids index `token_ids`; `accepted` leaves the root out; `appended`
ends with the bonus token and `logprobs` are the target's own. The module knows nothing about text.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TextIO

from engine.config import EngineConfig
from engine.draft_tree import DraftTree

SCHEMA = 1


@dataclass(frozen=True, slots=True, eq=False)
class StepRecord:
    """One sequence's part of one step."""

    step: int  # from 1
    sequence: int  # index in the batch
    position: int  # of the root
    tree: DraftTree
    appended: tuple[int, ...]  # the accepted path, then the bonus token
    logprobs: tuple[float, ...]  # the target's own, one for each appended token
    stage_seconds: Mapping[str, float] | None

    @property
    def accepted(self) -> tuple[int, ...]:
        """Node ids of the accepted path, root excluded."""
        parents, tokens = self.tree.parents.tolist(), self.tree.token_ids.tolist()
        nodes = {pair: node for node, pair in enumerate(zip(parents, tokens, strict=True))}
        path = [0]
        for token in self.appended[:-1]:
            path.append(nodes[path[-1], token])
        return tuple(path[1:])


class TraceWriter:
    """Writes records to an open text file, a line each."""

    def __init__(
        self, file: TextIO, config: EngineConfig, prompts: Sequence[Sequence[int]]
    ) -> None:
        self._file = file
        head = {"schema": SCHEMA, **asdict(config), "prompts": [list(p) for p in prompts]}
        self._write(head)

    def write(self, record: StepRecord) -> None:
        """Append the line of `record`."""
        tree = record.tree
        self._write(
            {
                "step": record.step,
                "sequence": record.sequence,
                "position": record.position,
                "token_ids": tree.token_ids.tolist(),
                "parents": tree.parents.tolist(),
                "depths": tree.depths.tolist(),
                "path_log_probs": tree.path_log_probs.tolist(),
                "accepted": record.accepted,
                "appended": record.appended,
                "logprobs": record.logprobs,
                "stage_seconds": record.stage_seconds,
            }
        )

    def _write(self, fields: Mapping[str, object]) -> None:
        self._file.write(json.dumps(fields, allow_nan=False) + "\n")
