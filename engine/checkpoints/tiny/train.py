"""Train the tiny pair: the target first, then the drafter against the saved target.

    python -m engine.checkpoints.tiny.train target --corpus DIR --out DIR
    python -m engine.checkpoints.tiny.train drafter --corpus DIR --out DIR

Each has two phases, short sequences and long ones, under one learning-rate schedule. They write
`DIR/target` and `DIR/drafter`; the drafter reads `DIR/target`. `--smoke` takes a few steps on the
held-out texts, to see that everything runs. Needs no network.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from engine.checkpoints.tiny.batches import Corpus, make_corpus, read_corpus
from engine.checkpoints.tiny.configs import DRAFTER, TARGET
from engine.checkpoints.tiny.drafter_task import DrafterTask
from engine.checkpoints.tiny.fitting import Phase, Settings, Task, fit
from engine.checkpoints.tiny.target_task import TargetTask, initial_target
from engine.weights import load_target

TEXTS = Path(__file__).parent / "texts"
LENGTHS = (1024, 8704)  # bytes of a phase's sequences: short ones, then ones beyond 8192
MINUTES = {"target": (2.5, 1.5), "drafter": (1.4, 1.4)}
RATES = {"target": 3e-3, "drafter": 2e-3}
NUM_TEMPLATED = 24_000_000  # bytes of predictable documents; fewer in a smoke run
SMOKE_TEMPLATED = 200_000


def main() -> None:
    """Run the command line."""
    options = _parser().parse_args()
    if options.smoke:
        options.lengths, options.batch_tokens = (128, 512), 1024
        options.steps = options.steps or (6, 3)
    torch.manual_seed(options.seed)
    corpus = _corpus(options)
    steps = options.steps or (None, None)
    minutes = options.minutes or MINUTES[options.model]
    phases = [Phase(*phase) for phase in zip(options.lengths, minutes, steps, strict=True)]
    rate = options.learning_rate or RATES[options.model]
    fit(_task(options), corpus, phases, Settings(rate, options.batch_tokens, options.seed))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", choices=tuple(MINUTES))
    parser.add_argument("--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--corpus", type=Path, metavar="DIR", help="of code.bin and prose.bin")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--compile", action="store_true", help="compile the passes")
    parser.add_argument("--smoke", action="store_true", help="a few steps on the held-out texts")
    parser.add_argument("--resume", action="store_true", help="start from the target in --out")
    parser.add_argument("--lengths", type=int, nargs=2, default=LENGTHS, metavar="BYTES")
    parser.add_argument("--minutes", type=float, nargs=2, metavar="M", help="of each phase, or 0")
    parser.add_argument("--steps", type=int, nargs=2, metavar="N", help="instead of minutes")
    parser.add_argument("--batch-tokens", type=int, default=65536, metavar="N")
    parser.add_argument("--learning-rate", type=float, metavar="RATE")
    parser.add_argument("--seed", type=int, default=0, metavar="N")
    return parser


def _corpus(options: argparse.Namespace) -> Corpus:
    if not options.smoke:
        if options.corpus is None:
            raise SystemExit("--corpus: expected a folder, got none (only --smoke goes without)")
        return read_corpus(
            options.corpus, num_templated=NUM_TEMPLATED, seed=options.seed, device=options.device
        )
    return make_corpus(
        (TEXTS / "code.txt").read_bytes(),
        (TEXTS / "prose.txt").read_bytes(),
        num_templated=SMOKE_TEMPLATED,
        seed=options.seed,
        device=options.device,
    )


def _task(options: argparse.Namespace) -> Task:
    device = torch.device(options.device)
    texts = {path.stem: path.read_bytes() for path in sorted(TEXTS.glob("*.txt"))}
    compile_pass = _compiled if options.compile else _as_it_is
    saved = options.out / "target"
    if options.model == "target":
        start = (
            load_target(saved, device=device, dtype=torch.float32)
            if options.resume
            else initial_target(TARGET, device, options.seed)
        )
        return TargetTask(start, saved, texts, compile_pass)
    target = load_target(saved, device=device)
    out = options.out / "drafter"
    return DrafterTask(DRAFTER, target, out, texts, compile_pass, options.seed)


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, dynamic=False)


def _as_it_is(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


if __name__ == "__main__":
    main()
