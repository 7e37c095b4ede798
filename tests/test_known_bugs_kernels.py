"""Failures other engines' kernels were shipped with, tried on every backend of tree attention.

As in test_tree_attention.py one test repeats this file in Triton's interpreter, where a captured
call is a plain one over the same buffers; on a CUDA device it is a graph (marker gpu).
"""

import pytest
import torch

from engine.kernels import OPS, TreeAttentionCase
from engine.kernels.tree_attention.cases import bush, chain, star
from tests.attention_runs import (
    INTERPRETED,
    KERNEL_RUNS,
    RUNS,
    call,
    captured,
    far_apart,
    in_float64,
)
from tests.interpreter import assert_passes_in_the_interpreter

OP = OPS["tree_attention"]
NO_PAGE = 2**31 - 1  # beyond every pool
NEVER_READ = {"page_table": NO_PAGE, "ancestor_bits": -1, "context_lens": 0, "tree_sizes": 1}

# The interpreter takes seconds for what a device does at once.
SIZES = (1, 16, 33) if INTERPRETED else range(1, 71)
OFFSETS = (0, 1, 31) if INTERPRETED else range(64)
GRAPH_RUNS = [("cpu", "triton_split")] if INTERPRETED else KERNEL_RUNS
GRAPH_PAGES = [16] if INTERPRETED else [1, 64]
NUM_ROUNDS = 2 if INTERPRETED else 4

# Rounds of one graph, of three sequences and trees of up to 40 tokens: lengths that shrink and
# grow, an empty context, trees of the root alone, both sides of a mask word.
ROUNDS = (
    ((64, 5, 33), (bush(40, 1), chain(3), star(17))),
    ((0, 70, 1), (star(2), bush(33, 2), (-1,))),
    ((31, 0, 80), ((-1,), chain(32), bush(9, 3))),
    ((16, 48, 2), (chain(40), (-1,), bush(34, 4))),
)
TOKENS, PAGES = 40, 40


def round_case(index, page_size, *, hybrid):
    lengths, trees = ROUNDS[index]
    sizes = {"num_heads": 1, "page_size": page_size, "hybrid": hybrid}
    return TreeAttentionCase(f"round {index}", "", lengths, trees, seed=index, **sizes)


def buffers_for(arguments):
    """Fixed tensors with room for every round, the arguments of one call."""
    q, pages = arguments["q"], arguments["kv_pages"]
    N, _, H, D = q.shape
    shapes = {
        "q": (N, TOKENS, H, D),
        "kv_pages": (PAGES * 16 // pages.shape[1], *pages.shape[1:]),
        "page_table": (N, 160 // pages.shape[1] + 2),
        "context_lens": (N,),
        "ancestor_bits": (N, TOKENS, 2),
        "tree_sizes": (N,),
        "tree_kv": (N, TOKENS, D),
    }
    held = {name: arguments[name] for name in shapes if arguments[name] is not None}
    buffers = {name: held[name].new_empty(shapes[name]) for name in held}
    value_dim = arguments["value_dim"]
    return buffers | {
        "out": q.new_empty(N, TOKENS, H, value_dim),
        "lse": torch.empty(N, TOKENS, H, device=q.device),
        "workspace": torch.empty(64 * N * TOKENS * H * (value_dim + 1), device=q.device),
    }


def load(buffers, arguments):
    """Poison every buffer, then write one round's operands into a corner of it."""
    for name, buffer in buffers.items():
        buffer.fill_(NEVER_READ.get(name, torch.nan))
        if name in arguments:
            corner = tuple(slice(size) for size in arguments[name].shape)
            buffer[corner] = arguments[name]


def assert_agrees(out, lse, arguments, dtype=torch.float32):
    """Compare the rows of the trees with the reference in float64; those behind them are empty."""
    want_out, want_lse = OP.reference(**in_float64(arguments))
    T, tolerance = want_out.shape[1], OP.tolerance(dtype)
    error, size = (out[:, :T].double() - want_out).norm(dim=-1), want_out.norm(dim=-1)
    assert (error <= tolerance.output_rel * size).all(), error.max()
    torch.testing.assert_close(lse[:, :T].double(), want_lse, rtol=0, atol=tolerance.lse_abs)
    assert (out[:, T:] == 0).all()
    assert (lse[:, T:] == -torch.inf).all()


@pytest.mark.parametrize(("device", "backend"), GRAPH_RUNS)
@pytest.mark.parametrize("hybrid", [False, True], ids=["paged", "hybrid"])
@pytest.mark.parametrize("page_size", GRAPH_PAGES)
def test_a_captured_call_follows_what_its_buffers_hold(device, backend, hybrid, page_size):
    rounds = [
        OP.inputs(round_case(index, page_size, hybrid=hybrid), device=device)
        for index in range(NUM_ROUNDS)
    ]
    buffers = buffers_for(rounds[0])
    options = {name: rounds[0][name] for name in ("softmax_scale", "value_dim")}
    if backend == "triton_serial":
        del buffers["workspace"]
    load(buffers, rounds[0])
    replay = captured(lambda: call(backend, buffers, **options), device)

    for arguments in (*rounds, rounds[0]):
        load(buffers, arguments)
        replay()
        assert_agrees(buffers["out"], buffers["lse"], arguments)


@pytest.mark.parametrize(("device", "backend"), KERNEL_RUNS)
@pytest.mark.parametrize("name", ["kv_pages", "q", "tree_kv", "out"])
def test_rows_beyond_two_to_the_31_elements_are_found(device, backend, name):
    trees = (bush(5, 1), chain(3), star(4))
    sizes = {"num_heads": 1, "page_size": 64, "hybrid": name == "tree_kv"}
    case = TreeAttentionCase("", "", (40, 17, 33), trees, seed=6, **sizes)
    arguments = OP.inputs(case, device=device, dtype=torch.float16)
    assert (arguments["page_table"] == len(arguments["kv_pages"]) - 1).any()
    room = {"out": arguments["q"].new_zeros(3, 5, 1, case.value_dim)}
    moved = far_apart((arguments | room)[name])

    out, lse = call(backend, arguments | {name: moved})

    assert_agrees(out, lse, arguments, torch.float16)


@pytest.mark.parametrize(("device", "backend"), RUNS)
@pytest.mark.parametrize("hybrid", [False, True], ids=["paged", "hybrid"])
def test_every_tree_size_at_every_offset_agrees_with_the_reference(device, backend, hybrid):
    tree = bush(70, 5)
    for size in SIZES:
        offset = OFFSETS[size % len(OFFSETS)]
        case = TreeAttentionCase(
            "", "", (64 + offset, offset), (tree[:size], tree[: 1 + size // 2]),
            num_heads=1, page_size=16, hybrid=hybrid, seed=size,
        )  # fmt: skip
        arguments = OP.inputs(case, device=device)

        out, lse = call(backend, arguments)

        assert_agrees(out, lse, arguments)


if not INTERPRETED:

    def test_triton_backends_pass_this_file_in_the_interpreter():
        assert_passes_in_the_interpreter(__file__)
