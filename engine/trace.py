"""One JSON object a line for each sequence of each step: what was drafted and what became of it.

::

    {"schema": 1, "config": {"mode": "ddtree", ..}, "sampling": {"temperature": 0.0, ..},
     "seed": 0, "prompts": [[..]]}                                    the first line
    {"step": 1, "sequence": 0, "position": 11, "token_ids": [..], "parents": [-1, ..],
     "depths": [0, ..], "path_log_probs": [0.0, ..], "accepted": [1, 4], "appended": [..],
     "logprobs": [..], "stage_seconds": {"draft": ..} or null}        all others

`position` is the root's; node ids index `token_ids`; `accepted` leaves the root out; `appended`
ends with the bonus token and may go beyond what was asked for; `logprobs` are the target's own, one
for each appended token. The module knows nothing about text.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import BinaryIO

from engine.config import EngineConfig
from engine.draft_tree import DraftTree
from engine.sampling import Sampling

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class TraceHead:
    """What the steps of a trace have in common: enough to run them again with the same models."""

    config: EngineConfig
    sampling: Sampling
    seed: int
    prompts: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True, eq=False)
class StepRecord:
    """One sequence's part of one step."""

    step: int  # from 1
    sequence: int  # index in the batch
    position: int  # of the root
    tree: DraftTree
    appended: tuple[int, ...]  # the accepted path, then the bonus token
    logprobs: tuple[float, ...]  # the target's own, one for each appended token
    stage_seconds: Mapping[str, float] | None  # None = nobody took the time

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
    """Writes a head and then records to a binary file, a line each.

    Each line is handed over whole, so in an unbuffered file none is ever torn by an interrupt.
    """

    def __init__(self, file: BinaryIO, head: TraceHead) -> None:
        self._file = file
        self._write({"schema": SCHEMA, **asdict(head)})

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
        line = json.dumps(fields, allow_nan=False).encode() + b"\n"
        while line:  # a pipe may take a part at a time
            line = line[self._file.write(line) :]
