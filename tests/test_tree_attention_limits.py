"""Tree attention at its limits: memory it may touch, numbers of splits, sizes of scores, errors.

As in test_tree_attention.py one test repeats this file in Triton's interpreter.
"""

from dataclasses import replace

import pytest
import torch

from engine.config import PAGE_SIZES
from engine.errors import ShapeError
from engine.kernels import OPS, TreeAttentionCase, workspace_size
from engine.kernels.tree_attention.cases import bush, chain, star
from tests.attention_runs import (
    INTERPRETED,
    SPLIT_DEVICES,
    TRITON_BACKENDS,
    assert_close,
    call,
    eager,
    errors,
    every_kernel_run,
    every_run,
    in_float64,
    not_interpreted,
)
from tests.guarded import guarded
from tests.interpreter import assert_passes_in_the_interpreter

OP = OPS["tree_attention"]
CASES = {case.name: case for case in OP.cases}
OPERANDS = (
    "q", "kv_pages", "page_table", "context_lens", "ancestor_bits", "tree_sizes", "tree_kv"
)  # fmt: skip
PER_SEQUENCE = ("q", "page_table", "context_lens", "ancestor_bits", "tree_sizes", "tree_kv")


def first_sequences(arguments, count):
    """The same call for the first sequences only."""
    return arguments | {
        name: arguments[name][:count] for name in PER_SEQUENCE if arguments[name] is not None
    }


if INTERPRETED:

    @every_run
    @pytest.mark.parametrize("hybrid", [False, True], ids=["paged", "hybrid"])
    @pytest.mark.parametrize(
        ("page_size", "at_end"), [(size, True) for size in PAGE_SIZES] + [(16, False)]
    )
    def test_no_memory_beside_the_operands_is_touched(device, backend, page_size, hybrid, at_end):
        case = TreeAttentionCase(
            "", "", (33, 0, 64), (bush(5, 1), chain(3), star(2)), num_heads=1,
            page_size=page_size, hybrid=hybrid,
        )  # fmt: skip
        arguments = OP.inputs(case, device=device)
        arguments["page_table"] = arguments["page_table"][:, :-2]  # as wide as the longest
        expected = call(backend, arguments)
        options = {
            "out": torch.empty_like(expected[0]),
            "lse": torch.empty_like(expected[1]),
        }
        if backend == "triton_split":
            options["workspace"] = torch.empty(workspace_size(**arguments, backend=backend))
        tensors = {name: arguments[name] for name in OPERANDS if arguments[name] is not None}
        kept = {
            name: guarded(tensor, at_end=at_end) for name, tensor in (tensors | options).items()
        }

        actual = call(backend, arguments | kept)

        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))

    @pytest.mark.parametrize("backend", TRITON_BACKENDS)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
    @pytest.mark.parametrize("name", ["any-mask", "hybrid", "production"])
    def test_the_error_is_at_most_twice_that_of_pytorch(backend, name, dtype):
        arguments = OP.inputs(CASES[name], dtype=dtype)

        expected = OP.reference(**in_float64(arguments))

        error, lse_error = errors(call(backend, arguments), expected)

        eager_error, eager_lse_error = errors(eager(arguments), expected)
        assert error <= 2 * eager_error
        assert lse_error <= 2 * eager_lse_error


@pytest.mark.parametrize("device", SPLIT_DEVICES)
@pytest.mark.parametrize("num_splits", [1, 3, 9])
@pytest.mark.parametrize("hybrid", [False, True], ids=["paged", "hybrid"])
def test_rows_at_the_edges_of_splits_are_counted_once(device, num_splits, hybrid):
    contexts = (0, 63, 64, 65, 128, 191, 193)  # tiles have 32 or 64 rows
    trees = tuple(chain(1 + n % 3) for n in range(len(contexts)))
    case = TreeAttentionCase("", "", contexts, trees, 1, page_size=16, hybrid=hybrid)
    arguments = OP.inputs(case, device=device)

    actual = call("triton_split", arguments, num_splits=num_splits)

    assert_close(actual, OP.reference(**in_float64(arguments)), OP.tolerance(torch.float32))


@every_kernel_run
def test_a_workspace_may_hold_anything(device, backend):
    if backend == "triton_serial":
        pytest.skip("it takes no workspace")
    arguments = OP.inputs(CASES["uneven"], device=device)
    expected = call(backend, first_sequences(arguments, 2))
    workspace = torch.full((2 * workspace_size(**arguments, backend=backend),), torch.nan)
    workspace = workspace.to(device)

    first = call(backend, first_sequences(arguments, 2), workspace=workspace)
    call(backend, arguments, workspace=workspace)
    again = call(backend, first_sequences(arguments, 2), workspace=workspace)

    assert all(torch.equal(a, b) for a, b in zip(first, expected, strict=True))
    assert all(torch.equal(a, b) for a, b in zip(again, expected, strict=True))


@every_run
def test_a_tree_in_a_scratch_needs_no_page_at_all(device, backend):
    case = TreeAttentionCase("", "", (0, 0), (bush(9, 3), chain(4)), hybrid=True)
    arguments = OP.inputs(case, device=device)
    nothing = arguments | {
        "kv_pages": arguments["kv_pages"][:0],
        "page_table": arguments["page_table"][:, :0],
    }

    actual = call(backend, nothing)

    assert_close(actual, OP.reference(**in_float64(arguments)), OP.tolerance(torch.float32))


@every_run
def test_a_chunk_of_a_prompt_is_a_chain_of_any_length(device, backend):
    case = TreeAttentionCase("", "", (70,), (chain(200),), num_heads=1, page_size=64)
    arguments = OP.inputs(case, device=device)

    actual = call(backend, arguments)

    assert_close(actual, OP.reference(**in_float64(arguments)), OP.tolerance(torch.float32))


@every_run
def test_of_scores_far_apart_the_largest_takes_all(device, backend):
    case = replace(CASES["three-requests"], num_heads=1, query_scale=1e30)
    arguments = OP.inputs(case, device=device)
    want_out, want_lse = OP.reference(**in_float64(arguments))

    out, lse = call(backend, arguments)

    seen = want_lse.isfinite()
    torch.testing.assert_close(lse[seen].double(), want_lse[seen], rtol=1e-5, atol=0)
    torch.testing.assert_close(out.double(), want_out, rtol=1e-6, atol=0)
    assert (lse[~seen] == -torch.inf).all()


@every_run
def test_a_row_that_is_broken_is_not_hidden(device, backend):
    widths = {"value_dim": 512, "rope_dim": 64} if device == "cuda" else {}
    case = TreeAttentionCase("", "", (600, 70), (bush(9, 1), chain(4)), page_size=16, **widths)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    arguments = OP.inputs(case, device=device, dtype=dtype)
    arguments["kv_pages"][arguments["page_table"][0, 300 // 16], 300 % 16, 3] = torch.nan

    out, lse = call(backend, arguments)

    assert out[0].isnan().any(-1).all()
    assert lse[0].isnan().all()
    assert not out[1].isnan().any()
    assert not lse[1].isnan().any()


@not_interpreted
@pytest.mark.parametrize("num_splits", [0, -1, 65536, 2**31])
def test_numbers_of_splits_no_grid_has_are_refused(num_splits):
    with pytest.raises(ShapeError, match=rf"num_splits: expected 1\.\.65535, got {num_splits}"):
        OP.reference(**OP.inputs(CASES["root-only"]), num_splits=num_splits)


if not INTERPRETED:

    def test_triton_backends_pass_this_file_in_the_interpreter():
        assert_passes_in_the_interpreter(__file__)
