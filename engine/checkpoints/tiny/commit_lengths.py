"""Measure how many tokens a step of the tiny pair commits: by text, temperature, budget, context.

    python -m engine.checkpoints.tiny.commit_lengths --contexts 256 --dtype float32
    python -m engine.checkpoints.tiny.commit_lengths --windows 32 --device cuda --json FILE
    python -m engine.checkpoints.tiny.commit_lengths --read FILE FILE

Prompts are windows of the held-out texts, short and long ones that end at the same places; the
mean commit length of each window's continuation is one sample. Prints a Markdown table, and where
two contexts have the same windows a second one of what the longer one changes. `--json` names a
file that keeps every sample, `--read` prints the tables of such files again.
"""

import argparse
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import product
from math import sqrt
from pathlib import Path
from statistics import fmean, stdev

import torch

from engine import Engine, EngineConfig, EngineError, load_drafter, load_target, sample_text
from engine.presets import TEXTS

HERE = Path(__file__).parent
TEMPERATURES = (0.0, 1.0)
NODE_BUDGETS = (8, 16, 64)
CONTEXTS = (256, 8192)
LONGEST = max(CONTEXTS)  # windows end behind so many bytes, whatever their length
WINDOWS = {256: 32}  # of each text; long ones are dear
OTHER_WINDOWS = 8
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


def change_table(cells: Sequence[Cell]) -> list[str]:
    """Return what the longest context changes, window by window; nothing without such pairs.

    Each entry is the mean of the differences and its standard error; the last column averages the
    budgets in each window first.
    """
    found = {(c.text, c.temperature, c.node_budget, c.context): c.commit_lengths for c in cells}
    short, long = min(c.context for c in cells), max(c.context for c in cells)
    budgets = sorted({cell.node_budget for cell in cells})
    rows = []
    for text, temperature in dict.fromkeys((c.text, c.temperature) for c in cells):
        before, after = (
            [found.get((text, temperature, budget, context), ()) for budget in budgets]
            for context in (short, long)
        )
        if short == long or {len(lengths) for lengths in (*before, *after)} != {len(after[0])}:
            continue
        changes = [
            [b - a for a, b in zip(*pair, strict=True)] for pair in zip(before, after, strict=True)
        ]
        changes.append([fmean(window) for window in zip(*changes, strict=True)])
        rows.append(f"| {text} | {temperature:g} | {' | '.join(map(_with_error, changes))} |")
    if not rows:
        return []
    columns = " | ".join(f"budget {budget}" for budget in budgets)
    head = f"| {long} less {short} | T | {columns} | all budgets |"
    return [head, f"| --- |{' ---: |' * (len(budgets) + 2)}", *rows]


def _with_error(values: Sequence[float]) -> str:
    return f"{fmean(values):+.2f} ± {stdev(values) / sqrt(len(values)):.2f}"


def read_cells(file: Path) -> list[Cell]:
    """Return the cells that `--json` wrote."""
    stored = json.loads(file.read_text(encoding="utf-8"))
    return [
        Cell(**fields | {"commit_lengths": tuple(fields["commit_lengths"])}) for fields in stored
    ]


def prompts(text: bytes, context: int, num_windows: int) -> list[list[int]]:
    """Return windows of `context` bytes whose ends do not depend on `context`."""
    last = len(text)
    ends = [LONGEST + (last - LONGEST) * i // (num_windows - 1) for i in range(num_windows)]
    return [list(text[end - context : end]) for end in ends]


def measure(
    engine: Engine, windows: Sequence[Sequence[int]], temperature: float, new_tokens: int
) -> list[float]:
    """Return the mean commit length of each window's continuation."""
    generated = engine.generate(
        windows,
        max_new_tokens=new_tokens,
        temperature=temperature,
        seed=[SEED + index for index in range(len(windows))],
    )
    return [fmean(one.commit_lengths) for one in generated]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line."""
    options = _parser().parse_args(arguments)
    if options.read is not None:
        cells = [cell for file in options.read for cell in read_cells(file)]
        print("\n".join((*HEAD, *(cell.row for cell in cells))))
    else:
        _check(options)
        try:
            cells = _measure_all(options)
        except EngineError as error:
            raise SystemExit(str(error)) from None
    if changes := change_table(cells):
        print("\n".join(("", *changes)))
    if options.json is not None:
        options.json.write_text(json.dumps([asdict(cell) for cell in cells], indent=1) + "\n")


def _check(options: argparse.Namespace) -> None:
    if options.windows is not None and options.windows < 2:
        raise SystemExit(
            f"windows: expected at least 2, got {options.windows} (one sample has no spread)"
        )
    for context in options.contexts:
        if not 1 <= context <= LONGEST:
            raise SystemExit(
                f"contexts: expected 1..{LONGEST}, got {context} (windows end behind {LONGEST} "
                "bytes)"
            )


def _measure_all(options: argparse.Namespace) -> list[Cell]:
    """Measure and print cell by cell."""
    target = load_target(options.models / "target", device=options.device, dtype=options.dtype)
    drafter = load_drafter(options.models / "drafter", target)
    cells = []
    print("\n".join(HEAD), flush=True)
    for context, budget in product(options.contexts, options.budgets):
        config = EngineConfig(
            node_budget=budget,
            page_size=64,
            attention_backend=options.backend,
            max_context=context + options.new_tokens,
            prefill_chunk=512,
        )
        engine = Engine(target, drafter, config)
        num_windows = options.windows or WINDOWS.get(context, OTHER_WINDOWS)
        for name, temperature in product(TEXTS, options.temperatures):
            windows = prompts(sample_text(name), context, num_windows)
            lengths = measure(engine, windows, temperature, options.new_tokens)
            cells.append(Cell(name, temperature, budget, context, tuple(lengths)))
            print(cells[-1].row, flush=True)
    return cells


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("--models", type=Path, default=HERE, metavar="DIR")
    few = ", ".join(f"{windows} for context {context}" for context, windows in WINDOWS.items())
    add("--windows", type=int, metavar="N", help=f"of each text; default {OTHER_WINDOWS}, {few}")
    add("--contexts", type=int, nargs="+", default=CONTEXTS, metavar="BYTES")
    add("--temperatures", type=float, nargs="+", default=TEMPERATURES, metavar="T")
    add("--budgets", type=int, nargs="+", default=NODE_BUDGETS, metavar="N")
    add("--new-tokens", type=int, default=NEW_TOKENS, metavar="N", help="behind each window")
    add("--device", default="cpu")
    add("--backend", default="reference", metavar="NAME")
    add("--dtype", type=_dtype, default=torch.bfloat16, metavar="NAME")
    add("--json", type=Path, metavar="FILE", help="keep every sample")
    add("--read", type=Path, nargs="+", metavar="FILE", help="print what --json kept")
    return parser


def _dtype(name: str) -> torch.dtype:
    known = {"bfloat16": torch.bfloat16, "float32": torch.float32}
    if name not in known:
        raise argparse.ArgumentTypeError(f"expected one of {', '.join(known)}, got {name!r}")
    return known[name]


if __name__ == "__main__":
    main()
