"""Decode a prompt and show each step's draft tree, what it committed and how fast that was.

    python -m engine "def main("
    python -m engine --mode dflash --temperature 1 --seed 3 --show text "Once upon a time"
    python -m engine --regime 8 --page-size 64 --trace steps.jsonl "prompt"

The model is the trained pair of `engine/checkpoints/tiny`, whose tokens are bytes. What it commits
in a step comes from the text; `--regime` plants the target's own continuation instead, to show a
chosen commit length. The trace has one JSON object a line, see `engine/trace.py`.
"""

import argparse
import os
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from typing import NoReturn

import torch

from engine.config import CACHE_LAYOUTS, MAX_NODE_BUDGET, MODES, PAGE_SIZES, EngineConfig
from engine.decoder import Engine
from engine.drafter import DraftModel
from engine.errors import BackendError, BudgetError, ConfigError, EngineError, RequestError
from engine.kernels import OPS
from engine.planted import PlantedDrafter, record_continuation
from engine.presets import END_TOKEN, Preset, preset
from engine.sampling import Sampling
from engine.trace import StepRecord, TraceWriter
from engine.tree_text import TextStream, quoted, tree_lines

USAGE_ERROR = 2


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage text."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE_ERROR, f"{self.prog}: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code: 0, or 2 for what the caller got wrong."""
    options = _parser().parse_args(arguments)
    try:
        _run(options)
    except (EngineError, OSError) as error:
        sys.stderr.write(f"python -m engine: {error}\n")
        return USAGE_ERROR
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="python -m engine", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("prompt", metavar="PROMPT", help="text; its UTF-8 bytes are the tokens")
    parser.add_argument("--max-new-tokens", type=int, default=64, metavar="N")
    parser.add_argument("--mode", default="ddtree", metavar="NAME", help=", ".join(MODES))
    parser.add_argument(
        "--node-budget", type=int, default=16, metavar="N", help=f"1..{MAX_NODE_BUDGET} draft nodes"
    )
    sizes = ", ".join(map(str, PAGE_SIZES))
    parser.add_argument(
        "--page-size", type=int, default=16, metavar="L", help=f"one of {sizes} rows"
    )
    parser.add_argument(
        "--cache-layout", default="paged", metavar="NAME", help=", ".join(CACHE_LAYOUTS)
    )
    backends = ", ".join(OPS["tree_attention"].implementations)
    parser.add_argument("--backend", default="reference", metavar="NAME", help=backends)
    parser.add_argument("--regime", type=int, metavar="N", help="commit N tokens in every step")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy")
    parser.add_argument("--top-k", type=int, metavar="K", help="sample from the K likeliest")
    parser.add_argument(
        "--top-p", type=float, default=1.0, metavar="P", help="from the nucleus of P"
    )
    parser.add_argument("--min-p", type=float, default=0.0, metavar="P", help="above P of the best")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the noise")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--show", default="trees", choices=("trees", "text"))
    parser.add_argument("--trace", metavar="FILE", help="one JSON object for each step")
    return parser


def _run(options: argparse.Namespace) -> None:
    """Decode step by step and print what each step drafted and committed."""
    config = _config(options)
    _check_request(options, config)
    prompt = list(os.fsencode(options.prompt))
    models = preset("tiny", device=options.device)
    engine = Engine(models.target, _drafter(models, prompt, options), config)
    with ExitStack() as stack:
        trace = None
        if options.trace is not None:
            file = stack.enter_context(open(options.trace, "w", encoding="utf-8"))  # noqa: PTH123
            trace = TraceWriter(file, config, [prompt])
        _decode(engine, prompt, options, trace)


def _decode(
    engine: Engine, prompt: list[int], options: argparse.Namespace, trace: TraceWriter | None
) -> None:
    sampling = Sampling(options.temperature, options.top_k, options.top_p, options.min_p)
    batch = engine.prefill([prompt], sampling=sampling, seed=options.seed)
    sequence, stream = batch.sequences[0], TextStream()
    start_s, step = time.perf_counter(), 0
    while (room := options.max_new_tokens - len(sequence.new_token_ids)) > 0:
        position = sequence.committed_length
        # The stages of `Engine.step`, one by one, so that the tree can be shown.
        trees = engine.build(batch, engine.draft(batch))
        appended = engine.commit(batch, trees, engine.verify(batch, trees))[0]
        step += 1
        logprobs = tuple(sequence.logprobs[-len(appended) :])
        record = StepRecord(step, 0, position, trees[0], appended, logprobs, None)
        if trace is not None:
            trace.write(record)
        if options.show == "trees":
            _write("\n".join(tree_lines(record)) + "\n")
        else:
            _write(stream.feed(_before_end(appended[:room])))
        if END_TOKEN in appended[:room]:
            break
    seconds = time.perf_counter() - start_s
    shown = _before_end(sequence.new_token_ids[: options.max_new_tokens])
    _write(f"text: {quoted(shown)}\n" if options.show == "trees" else stream.close() + "\n")
    _summarize(sequence.commit_lengths, len(shown), seconds)
    engine.release(batch)


def _config(options: argparse.Namespace) -> EngineConfig:
    return EngineConfig(
        mode=options.mode,
        node_budget=options.node_budget,
        page_size=options.page_size,
        cache_layout=options.cache_layout,
        attention_backend=options.backend,
    )


def _check_request(options: argparse.Namespace, config: EngineConfig) -> None:
    """Refuse what only this command can know to be wrong with a `RequestError`."""
    if options.max_new_tokens < 1:
        raise RequestError(f"max_new_tokens: expected at least 1, got {options.max_new_tokens}")
    room = config.max_context - options.max_new_tokens
    if len(os.fsencode(options.prompt)) > room:
        raise RequestError(
            f"prompt: expected at most {room} bytes, got {len(os.fsencode(options.prompt))} "
            f"(max_context is {config.max_context})"
        )
    if options.device == "cuda" and not torch.cuda.is_available():
        raise BackendError("device: expected cpu, got cuda (torch sees no CUDA device)")


def _drafter(models: Preset, prompt: Sequence[int], options: argparse.Namespace) -> DraftModel:
    if options.regime is None:
        return models.drafter
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
    ahead = options.max_new_tokens + models.drafter.config.block_size
    known = record_continuation(models.target, prompt, ahead)
    return PlantedDrafter(models.drafter, [known], options.regime)


def _before_end(token_ids: Sequence[int]) -> Sequence[int]:
    """Return the tokens before the one that ends a text."""
    return token_ids[: token_ids.index(END_TOKEN)] if END_TOKEN in token_ids else token_ids


def _summarize(commit_lengths: Sequence[int], num_tokens: int, seconds: float) -> None:
    mean = sum(commit_lengths) / len(commit_lengths)
    _write(f"commit lengths: {' '.join(map(str, commit_lengths))} (mean {mean:.2f})\n")
    rate = num_tokens / seconds
    _write(f"{num_tokens} tokens in {seconds:.2f} s, {rate:.1f} tokens/s\n")


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
