"""Decode a prompt with a preset and show each step's draft tree and commit length.

    python -m engine "prompt"
    python -m engine --regime 8 --page-size 64 "prompt"

The presets have random weights, so the text is noise and the drafter rarely right; `--regime`
plants the target's own continuation to show longer commits. Bytes are the tokens.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import torch

from engine.config import MAX_NODE_BUDGET, PAGE_SIZES, EngineConfig
from engine.decoder import Engine
from engine.draft_tree import DraftTree
from engine.drafter import DraftModel
from engine.errors import BackendError, BudgetError, ConfigError, RequestError
from engine.kernels import OPS
from engine.planted import PlantedDrafter, record_continuation
from engine.presets import END_TOKEN, NUM_BYTES, Preset, preset

USAGE_ERROR = 2
SHOWN_NODES = 12  # of each tree; the rest is counted


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, without the usage text."""

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE_ERROR, f"{self.prog}: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code: 0, or 2 for what the caller got wrong."""
    options = _parser().parse_args(arguments)
    try:
        _decode(options)
    except (BackendError, BudgetError, ConfigError, RequestError) as error:
        sys.stderr.write(f"python -m engine: {error}\n")
        return USAGE_ERROR
    return 0


def _parser() -> argparse.ArgumentParser:
    backends = ", ".join(OPS["tree_attention"].implementations)
    parser = _Parser(prog="python -m engine", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("prompt", help="text; its UTF-8 bytes are the tokens")
    parser.add_argument("--max-new-tokens", type=int, default=32, metavar="N")
    parser.add_argument(
        "--node-budget", type=int, default=16, metavar="N", help=f"1..{MAX_NODE_BUDGET} draft nodes"
    )
    sizes = ", ".join(map(str, PAGE_SIZES))
    parser.add_argument(
        "--page-size", type=int, default=16, metavar="L", help=f"one of {sizes} rows"
    )
    parser.add_argument("--backend", default="reference", metavar="NAME", help=backends)
    parser.add_argument("--regime", type=int, metavar="N", help="commit N tokens in every step")
    parser.add_argument("--temperature", type=float, default=0.0, metavar="T", help="0 is greedy")
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="of the noise")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    return parser


def _decode(options: argparse.Namespace) -> None:
    """Decode step by step and print what each step drafted and committed."""
    config = EngineConfig(
        node_budget=options.node_budget,
        page_size=options.page_size,
        attention_backend=options.backend,
    )
    _check_request(options, config)
    prompt = list(os.fsencode(options.prompt))
    models = preset("tiny", device=options.device)
    engine = Engine(models.target, _drafter(models, prompt, options), config)
    batch = engine.prefill([prompt], temperature=options.temperature, seed=options.seed)
    sequence, step = batch.sequences[0], 0
    while (room := options.max_new_tokens - len(sequence.new_token_ids)) > 0:
        # The stages of `Engine.step`, one by one, so that the tree can be shown.
        trees = engine.build(batch, engine.draft(batch))
        appended = engine.commit(batch, trees, engine.verify(batch, trees))[0]
        step += 1
        _write(_step_text(step, trees[0], appended))
        if END_TOKEN in appended[:room]:
            break
    shown = sequence.new_token_ids[: options.max_new_tokens]
    lengths = sequence.commit_lengths
    _write(f"text: {_text(shown)}")
    _write(f"commit lengths: {' '.join(map(str, lengths))} (mean {sum(lengths) / step:.2f})")
    engine.release(batch)


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
    if not options.regime - 1 <= options.node_budget:
        raise BudgetError(
            f"node_budget: expected at least {options.regime - 1}, got {options.node_budget} "
            f"(the path that regime {options.regime} commits)"
        )
    ahead = options.max_new_tokens + models.drafter.config.block_size
    known = record_continuation(models.target, prompt, ahead)
    return PlantedDrafter(models.drafter, [known], options.regime)


def _step_text(step: int, tree: DraftTree, appended: Sequence[int]) -> str:
    """Draw a tree as indented lines, children below their parent, accepted nodes marked."""
    accepted = _accepted_nodes(tree, appended)
    lines = [f"step {step}: {tree.num_nodes} nodes, commit length {len(appended)}"]
    for node in _preorder(tree)[: SHOWN_NODES + 1]:
        mark = "*" if node in accepted else " "
        token = _text([int(tree.token_ids[node])])
        probability = float(tree.path_log_probs[node].exp())
        indent = "  " * int(tree.depths[node])
        lines.append(f"  {mark} {indent}{token}  p={probability:.3f} node {node}")
    if tree.num_nodes > SHOWN_NODES:
        lines.append(f"    ... {tree.num_nodes - SHOWN_NODES} more")
    return "\n".join([*lines, f"  appended {_text(appended)}"])


def _accepted_nodes(tree: DraftTree, appended: Sequence[int]) -> set[int]:
    parents, tokens = tree.parents.tolist(), tree.token_ids.tolist()
    nodes = {pair: node for node, pair in enumerate(zip(parents, tokens, strict=True))}
    path = [0]
    for token in appended[:-1]:
        path.append(nodes[path[-1], token])
    return set(path)


def _preorder(tree: DraftTree) -> list[int]:
    parents = tree.parents.tolist()
    order: list[int] = []
    stack = [0]
    while stack:
        node = stack.pop()
        order.append(node)
        stack += [child for child in reversed(range(len(parents))) if parents[child] == node]
    return order


def _text(token_ids: Sequence[int]) -> str:
    """Show bytes as a quoted string and special tokens as <number>."""
    parts = [bytes([t]).decode("latin-1") if t < NUM_BYTES else f"<{t}>" for t in token_ids]
    return repr("".join(parts))


def _write(text: str) -> None:
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    sys.exit(main())
