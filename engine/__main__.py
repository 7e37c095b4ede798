"""Decode a prompt and show each step's draft tree, what it committed and how fast that was.

    python -m engine "def main("
    python -m engine --mode dflash --temperature 1 --seed 3 "Once upon a time"
    python -m engine --show text --trace steps.jsonl - < chapter.txt
    python -m engine --regime 8 --page-size 64 "prompt"

The model is the trained pair of `engine/checkpoints/tiny`, or any other whose tokens are bytes.
What a step commits comes from the text; `--regime` plants the target's own continuation instead, to
show a chosen commit length. With `--show text` the text alone goes to standard output and the
summary to standard error. The trace has one JSON object a line, see `engine/trace.py`.

Exit status: 0 ok · 2 what the caller got wrong · 130 interrupted · 141 nobody reads the output.
"""

import argparse
import io
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import NoReturn

import torch

from engine.batch import StepBatch
from engine.config import CACHE_LAYOUTS, MAX_NODE_BUDGET, MODES, PAGE_SIZES, EngineConfig
from engine.decoder import Engine
from engine.drafter import DraftModel
from engine.errors import BackendError, BudgetError, ConfigError, EngineError, RequestError
from engine.kernels import OPS
from engine.observer import StageClock
from engine.planted import PlantedDrafter, record_continuation
from engine.presets import END_TOKEN, NUM_BYTES, TINY
from engine.sampling import Sampling, check_integer
from engine.target import Target
from engine.trace import StepRecord, TraceHead, TraceWriter
from engine.tree_text import TextStream, quoted, tree_lines
from engine.verify import Backends
from engine.weights import load_drafter, load_target

USAGE_ERROR = 2
INTERRUPTED = 130  # as shells say: 128 and the signal's number
BROKEN_PIPE = 141


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage text."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE_ERROR, f"{self.prog}: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit status."""
    options = _parser().parse_args(arguments)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal may lack a character of the text
    try:
        _run(options)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # What is still buffered goes nowhere, or the interpreter would complain of it at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except (EngineError, OSError) as error:
        sys.stderr.write(f"python -m engine: {error}\n")
        return USAGE_ERROR
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m engine", description=(__doc__ or "").splitlines()[0])
    add = parser.add_argument
    add("prompt", metavar="PROMPT", help="text whose bytes are the tokens; - reads standard input")
    add("--max-new-tokens", type=int, default=64, metavar="N")
    add("--mode", default="ddtree", metavar="NAME", help=", ".join(MODES))
    add("--target", type=Path, metavar="DIR", help="a checkpoint over bytes; default: the tiny one")
    add("--drafter", type=Path, metavar="DIR", help="of this target; default: the tiny one's")
    add("--node-budget", type=int, default=16, metavar="N", help=f"1..{MAX_NODE_BUDGET} nodes")
    sizes = ", ".join(map(str, PAGE_SIZES))
    add("--page-size", type=int, default=16, metavar="L", help=f"one of {sizes} rows")
    add("--cache-layout", default="paged", metavar="NAME", help=", ".join(CACHE_LAYOUTS))
    backends = ", ".join(OPS["tree_attention"].implementations)
    add("--backend", default="reference", metavar="NAME", help=f"of attention: {backends}")
    backends = ", ".join(OPS["grouped_experts"].implementations)
    add("--moe-backend", default="reference", metavar="NAME", help=f"of experts: {backends}")
    add("--device", default="cpu", choices=("cpu", "cuda"))
    add("--regime", type=int, metavar="N", help="commit N tokens in every step")
    add("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy")
    add("--top-k", type=int, metavar="K", help="sample from the K likeliest")
    add("--top-p", type=float, default=1.0, metavar="P", help="from the nucleus of P")
    add("--min-p", type=float, default=0.0, metavar="P", help="above P of the likeliest")
    add("--seed", type=int, default=0, metavar="N", help="of the noise")
    add("--show", default="trees", choices=("trees", "text"))
    add("--trace", metavar="FILE", help="one JSON object for each step")
    return parser


def _run(options: argparse.Namespace) -> None:
    """Check what was asked, load the models, decode and sum up."""
    sampling = Sampling(options.temperature, options.top_k, options.top_p, options.min_p)
    prompt = _prompt(options.prompt)
    config = _config(options, prompt)
    _check_request(options)
    target, drafter = _models(options, prompt)
    engine = Engine(target, drafter, config)
    with ExitStack() as stack:
        trace = None
        if options.trace is not None:
            # Unbuffered: a line is in the file whole or not at all, whenever the command ends.
            file = stack.enter_context(open(options.trace, "wb", buffering=0))  # noqa: PTH123
            trace = TraceWriter(file, TraceHead(config, sampling, options.seed, (tuple(prompt),)))
            engine.observer = StageClock(target.device)
        batch = engine.prefill([prompt], sampling=sampling, seed=options.seed)
        seconds = _decode(engine, batch, options, trace)
    sequence = batch.sequences[0]
    shown = _before_end(sequence.new_token_ids[: options.max_new_tokens])
    if options.show == "trees":
        _write(f"text: {quoted(shown)}\n{_summary(sequence.commit_lengths, len(shown), seconds)}")
    else:
        sys.stderr.write(f"\n{_summary(sequence.commit_lengths, len(shown), seconds)}")


def _decode(
    engine: Engine, batch: StepBatch, options: argparse.Namespace, trace: TraceWriter | None
) -> float:
    """Step until the text ends, showing each step; return the seconds that the steps took."""
    sequence, stream = batch.sequences[0], TextStream()
    seconds, ended = 0.0, False
    while not ended and (room := options.max_new_tokens - len(sequence.new_token_ids)) > 0:
        start_s = time.perf_counter()
        record = _step(engine, batch)
        seconds += time.perf_counter() - start_s
        if trace is not None:
            trace.write(record)
        kept = record.appended[:room]
        ended = END_TOKEN in kept
        if options.show == "trees":
            _write("\n".join(tree_lines(record)) + "\n")
        else:
            _write(stream.feed(_before_end(kept)))
    if options.show == "text":
        _write(stream.close())
    return seconds


def _step(engine: Engine, batch: StepBatch) -> StepRecord:
    """Run the stages of `Engine.step` one by one, so that the tree can be shown."""
    (sequence,) = batch.sequences
    position = sequence.committed_length
    trees = engine.build(batch, engine.draft(batch))
    (appended,) = engine.commit(batch, trees, engine.verify(batch, trees))
    return StepRecord(
        step=len(sequence.commit_lengths),
        sequence=0,
        position=position,
        tree=trees[0],
        appended=appended,
        logprobs=tuple(sequence.logprobs[-len(appended) :]),
        stage_seconds=None if engine.observer is None else engine.observer.seconds(),
    )


def _prompt(argument: str) -> list[int]:
    """Return the bytes of the prompt."""
    text = sys.stdin.buffer.read() if argument == "-" else os.fsencode(argument)
    if not text:
        raise RequestError("prompt: expected at least one byte, got none (nothing to continue)")
    return list(text)


def _config(options: argparse.Namespace, prompt: Sequence[int]) -> EngineConfig:
    check_integer("max_new_tokens", options.max_new_tokens, least=1, reason="nothing to generate")
    return EngineConfig(
        mode=options.mode,
        node_budget=options.node_budget,
        page_size=options.page_size,
        cache_layout=options.cache_layout,
        attention_backend=options.backend,
        moe_backend=options.moe_backend,
        max_context=len(prompt) + options.max_new_tokens,
    )


def _check_request(options: argparse.Namespace) -> None:
    """Refuse what only this command can know to be wrong."""
    if options.device == "cuda" and not torch.cuda.is_available():
        raise BackendError("device: expected cpu, got cuda (torch sees no CUDA device)")
    if options.mode != "ar" and options.target is not None and options.drafter is None:
        raise RequestError(
            f"drafter: expected a folder beside --target, got none (mode {options.mode!r} drafts)"
        )
    if options.regime is None:
        return
    if options.temperature > 0.0:
        raise RequestError(
            f"temperature: expected 0 with --regime, got {options.temperature} "
            "(the planted continuation is greedy)"
        )
    if options.mode == "ar":
        raise ConfigError(f"mode: expected one with drafts for --regime, got {options.mode!r}")
    if not options.regime - 1 <= options.node_budget:
        raise BudgetError(
            f"node_budget: expected at least {options.regime - 1}, got {options.node_budget} "
            f"(the path that regime {options.regime} commits)"
        )


def _models(options: argparse.Namespace, prompt: Sequence[int]) -> tuple[Target, DraftModel | None]:
    """Load what the mode needs, in float32, so that rounding seldom decides the next token."""
    folder = options.target or TINY / "target"
    target = load_target(folder, device=options.device, dtype=torch.float32)
    if target.config.vocab_size < NUM_BYTES:
        raise RequestError(
            f"target: expected a vocabulary of at least {NUM_BYTES}, got "
            f"{target.config.vocab_size} (bytes are the tokens here)"
        )
    longest = target.config.max_position_embeddings
    if len(prompt) + options.max_new_tokens > longest:
        raise RequestError(
            f"prompt and new tokens: expected at most {longest}, got {len(prompt)} + "
            f"{options.max_new_tokens} (what the target can see)"
        )
    if options.mode == "ar":
        return target, None
    drafter = load_drafter(options.drafter or TINY / "drafter", target)
    if options.regime is None:
        return target, drafter
    ahead = options.max_new_tokens + drafter.config.block_size
    backends = Backends(options.backend, options.moe_backend)
    known = record_continuation(target, prompt, ahead, backends=backends)
    return target, PlantedDrafter(drafter, [known], options.regime)


def _before_end(token_ids: Sequence[int]) -> Sequence[int]:
    """Return the tokens before the one that ends a text."""
    return token_ids[: token_ids.index(END_TOKEN)] if END_TOKEN in token_ids else token_ids


def _summary(commit_lengths: Sequence[int], num_tokens: int, seconds: float) -> str:
    mean = sum(commit_lengths) / len(commit_lengths)
    rate = num_tokens / seconds
    return (
        f"commit lengths: {' '.join(map(str, commit_lengths))} (mean {mean:.2f})\n"
        f"{num_tokens} tokens in {seconds:.2f} s, {rate:.1f} tokens/s\n"
    )


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
