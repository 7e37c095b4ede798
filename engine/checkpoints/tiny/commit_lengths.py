"""Measure how many tokens a step of the tiny pair commits: by text, temperature, budget, context.

    python -m engine.checkpoints.tiny.commit_lengths --models engine/checkpoints/tiny

Prompts are windows of the held-out texts, short and long ones that end at the same places; the
mean commit length of each window's continuation is one sample. Prints a Markdown table; `--json`
names a file that keeps every sample.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from statistics import fmean, stdev

import torch

from engine import Engine, EngineConfig, load_drafter, load_target

HERE = Path(__file__).parent
TEXTS = ("predictable", "code", "prose")
TEMPERATURES = (0.0, 1.0)
NODE_BUDGETS = (8, 16, 64)
CONTEXTS = (256, 8192)
NEW_TOKENS = 96
SEED = 1


@dataclass(frozen=True, slots=True)
class Cell:
    """The samples of one combination."""

    text: str
    temperature: float
    node_budget: int
    context: int
    commit_lengths: tuple[float, ...]  # mean of each window's continuation

    @property
    def row(self) -> str:
        """The cell as a line of the table."""
        mean, spread = fmean(self.commit_lengths), stdev(self.commit_lengths)
        return (
            f"| {self.text} | {self.temperature:g} | {self.node_budget} | {self.context} "
            f"| {mean:.2f} | {spread:.2f} | {len(self.commit_lengths)} |"
        )


HEAD = (
    "| text | T | node budget | context | commit length | spread over windows | windows |",
    "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
)


def prompts(text: bytes, context: int, num_windows: int) -> list[list[int]]:
    """Return windows of `context` bytes whose ends do not depend on `context`."""
    first, last = max(CONTEXTS), len(text)
    ends = [first + (last - first) * i // max(1, num_windows - 1) for i in range(num_windows)]
    return [list(text[end - context : end]) for end in ends]


def measure(engine: Engine, windows: Sequence[Sequence[int]], temperature: float) -> list[float]:
    """Return the mean commit length of each window's continuation."""
    generated = engine.generate(
        windows,
        max_new_tokens=NEW_TOKENS,
        temperature=temperature,
        seed=[SEED + index for index in range(len(windows))],
    )
    return [fmean(one.commit_lengths) for one in generated]


def main() -> None:
    """Run the command line."""
    options = _parser().parse_args()
    target = load_target(options.models / "target", device=options.device, dtype=options.dtype)
    drafter = load_drafter(options.models / "drafter", target)
    cells = []
    print("\n".join(HEAD), flush=True)
    for context, budget in product(options.contexts, NODE_BUDGETS):
        config = EngineConfig(
            node_budget=budget,
            page_size=64,
            attention_backend=options.backend,
            max_context=context + NEW_TOKENS,
            prefill_chunk=512,
        )
        engine = Engine(target, drafter, config)
        for name, temperature in product(TEXTS, TEMPERATURES):
            windows = prompts(
                (HERE / "texts" / f"{name}.txt").read_bytes(), context, options.windows
            )
            lengths = tuple(measure(engine, windows, temperature))
            cells.append(Cell(name, temperature, budget, context, lengths))
            print(cells[-1].row, flush=True)
    if options.json:
        options.json.write_text(json.dumps([asdict(cell) for cell in cells], indent=1) + "\n")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", type=Path, default=HERE, metavar="DIR")
    parser.add_argument("--windows", type=int, default=8, metavar="N", help="of each text, >= 2")
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS, metavar="BYTES")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--backend", default="reference", metavar="NAME")
    parser.add_argument("--dtype", type=_dtype, default=torch.bfloat16, metavar="NAME")
    parser.add_argument("--json", type=Path, metavar="FILE")
    return parser


def _dtype(name: str) -> torch.dtype:
    known = {"bfloat16": torch.bfloat16, "float32": torch.float32}
    if name not in known:
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(known)}, got {name!r}")
    return known[name]


if __name__ == "__main__":
    main()
