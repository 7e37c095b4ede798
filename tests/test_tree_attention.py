"""Tree attention: the reference against a second formulation, every backend against the reference.

Triton's interpreter has to be chosen before Triton is imported, so one test of the ordinary run
repeats this file in a process of its own with TRITON_INTERPRET=1; there the Triton backends run
on the CPU. On a CUDA device all backends run compiled (marker gpu).
"""

import os
from dataclasses import replace

import pytest
import torch

from engine.config import PAGE_SIZES
from engine.errors import BackendError, ShapeError
from engine.kernels import OPS, launched_programs, tree_attention
from engine.kernels.tree_attention import TreeAttentionCase
from engine.kernels.tree_attention.cases import bush, inputs
from tests.interpreter import assert_passes_in_the_interpreter

OP = OPS["tree_attention"]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
TRITON_BACKENDS = [name for name in OP.implementations if name != "reference"]
CASES = {case.name: case for case in OP.cases}

no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
RUNS = [("cpu", "reference")] + [("cpu", name) for name in TRITON_BACKENDS if INTERPRETED]
if not INTERPRETED:
    RUNS += [
        pytest.param("cuda", name, marks=[pytest.mark.gpu, no_gpu]) for name in OP.implementations
    ]
SPLIT_DEVICES = ["cpu"] if INTERPRETED else [pytest.param("cuda", marks=[pytest.mark.gpu, no_gpu])]
# The interpreter is slow, and cannot multiply bfloat16: it takes float16 for a few cases instead.
CASES_BY_DTYPE = [
    pytest.param(case, dtype, id=f"{case.name}-{dtype}")
    for dtype in (torch.float32, torch.float16, torch.bfloat16)
    for case in OP.cases
    if not INTERPRETED
    or dtype == torch.float32
    or (dtype == torch.float16 and case.name in ("strided", "hybrid", "production"))
]
every_run = pytest.mark.parametrize(("device", "backend"), RUNS)
every_case = pytest.mark.parametrize("case", OP.cases, ids=lambda case: case.name)


def dense_attention(arguments):
    """Attend through torch's own attention, one query at a time over the rows it may see."""
    double = {
        name: value.double() if torch.is_tensor(value) and value.is_floating_point() else value
        for name, value in arguments.items()
    }
    q, pages, value_dim = double["q"], double["kv_pages"], double["value_dim"]
    N, T, H, _ = q.shape
    out = torch.zeros(N, T, H, value_dim, dtype=torch.float64)
    lse = torch.full((N, T, H), -torch.inf, dtype=torch.float64)
    for n in range(N):
        context, size = int(double["context_lens"][n]), int(double["tree_sizes"][n])
        in_pages = context + (size if double["tree_kv"] is None else 0)
        table = double["page_table"][n]
        rows = [pages[table[p // pages.shape[1]], p % pages.shape[1]] for p in range(in_pages)]
        rows += [] if double["tree_kv"] is None else list(double["tree_kv"][n, :size])
        for t in range(size):
            words = [int(word) % 2**32 for word in double["ancestor_bits"][n, t]]
            seen = [j for j in range(size) if words[j // 32] >> j % 32 & 1]
            visible = rows[:context] + [rows[context + j] for j in seen]
            if visible:
                keys = torch.stack(visible)[None].expand(H, -1, -1)
                scale = double["softmax_scale"]
                out[n, t] = torch.nn.functional.scaled_dot_product_attention(
                    q[n, t][:, None], keys, keys[..., :value_dim], scale=scale
                )[:, 0]
                lse[n, t] = torch.logsumexp((q[n, t][:, None] @ keys.mT)[:, 0] * scale, -1)
    return out, lse


def assert_close(actual, expected, tolerance):
    """Compare shape, dtype, where values are infinite, then values."""
    for have, want in zip(actual, expected, strict=True):
        assert have.shape == want.shape
        assert not have.isnan().any()
        assert torch.equal(have.isfinite(), want.isfinite())
    out, lse = (have.double() for have in actual)
    want_out, want_lse = (want.double() for want in expected)
    error, size = (out - want_out).norm(dim=-1), want_out.norm(dim=-1)
    assert (error <= tolerance.output_rel * size).all(), (error / size).nan_to_num().max()
    finite = want_lse.isfinite()
    assert ((lse - want_lse)[finite].abs() <= tolerance.lse_abs).all()


@every_case
@pytest.mark.skipif(INTERPRETED, reason="nothing of it runs in the interpreter")
def test_what_must_not_matter_is_made_to_hurt(case):
    arguments = OP.inputs(case)
    in_pages = [
        context + (0 if case.hybrid else size)
        for context, size in zip(case.context_lens, case.tree_sizes, strict=True)
    ]

    pages, table = arguments["kv_pages"], arguments["page_table"]
    unused = [table[n, -(-rows // case.page_size) :] for n, rows in enumerate(in_pages)]

    assert int(pages.isnan().all(-1).sum()) == pages.shape[0] * case.page_size - sum(in_pages) > 0
    assert all(((ids < 0) | (ids >= len(pages))).all() and len(ids) for ids in unused)


@pytest.mark.skipif(INTERPRETED, reason="nothing of it runs in the interpreter")
def test_every_page_size_has_cases_in_both_layouts():
    assert {case.page_size for case in OP.cases} == set(PAGE_SIZES)
    assert {case.page_size for case in OP.cases if case.hybrid} >= {1, 16, 64, 128}


@every_case
@pytest.mark.skipif(INTERPRETED, reason="nothing of it runs in the interpreter")
def test_reference_is_dense_attention_over_visible_rows(case):
    arguments = OP.inputs(case, dtype=torch.float64)

    actual = OP.reference(**arguments)

    assert actual[1].dtype == torch.float64
    assert_close(actual, dense_attention(arguments), OP.tolerance(torch.float64))


@every_run
@pytest.mark.parametrize(("case", "dtype"), CASES_BY_DTYPE)
def test_backend_agrees_with_the_reference(device, backend, case, dtype):
    arguments = OP.inputs(case, device=device, dtype=dtype)
    wide = {
        name: value.double() if torch.is_tensor(value) and value.is_floating_point() else value
        for name, value in arguments.items()
    }

    out, lse = OP.implementations[backend](**arguments)

    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    assert_close((out, lse), OP.reference(**wide), OP.tolerance(dtype))


@every_run
@pytest.mark.parametrize("name", ["hybrid", "hybrid-edge64-page64"])
def test_backend_repeats_itself_to_the_bit(device, backend, name):
    arguments = OP.inputs(CASES[name], device=device)

    first = OP.implementations[backend](**arguments)
    again = OP.implementations[backend](**arguments)

    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@every_run
@pytest.mark.parametrize("name", ["hybrid", "hybrid-edge64-page64"])
def test_order_of_the_batch_does_not_matter(device, backend, name):
    arguments = OP.inputs(CASES[name], device=device)
    N = len(arguments["q"])
    order = torch.arange(N - 1, -1, -1, device=device)
    per_sequence = ("q", "page_table", "context_lens", "ancestor_bits", "tree_sizes", "tree_kv")
    permuted = arguments | {
        key: arguments[key][order] for key in per_sequence if arguments[key] is not None
    }

    straight = OP.implementations[backend](**arguments)
    reordered = OP.implementations[backend](**permuted)

    assert all(torch.equal(a[order], b) for a, b in zip(straight, reordered, strict=True))


@every_run
def test_caller_may_own_the_outputs(device, backend):
    case = CASES["strided"]
    arguments = OP.inputs(case, device=device)
    expected = OP.implementations[backend](**arguments)
    wide_out = torch.full((*expected[0].shape[:3], 48), torch.nan, device=device)
    wide_lse = torch.full((*expected[1].shape, 2), torch.nan, device=device)
    out, lse = wide_out[..., : case.value_dim], wide_lse[..., 0]

    returned = OP.implementations[backend](**arguments, out=out, lse=lse)

    assert returned[0] is out
    assert returned[1] is lse
    assert torch.equal(out, expected[0])
    assert torch.equal(lse, expected[1])
    assert wide_out[..., case.value_dim :].isnan().all()
    assert wide_lse[..., 1].isnan().all()


@pytest.mark.parametrize("device", SPLIT_DEVICES)
@pytest.mark.parametrize(
    ("name", "num_splits"),
    [("edge64-page16", 1), ("edge64-page16", 3), ("any-mask", 4), ("strided", 7), ("long", 20)],
)
def test_number_of_splits_does_not_change_the_result(device, num_splits, name):
    arguments = OP.inputs(CASES[name], device=device)
    workspace = torch.full((70 * arguments["q"].numel(),), torch.nan, device=device)

    actual = OP.implementations["triton_split"](
        **arguments, num_splits=num_splits, workspace=workspace
    )

    assert_close(actual, OP.reference(**arguments), OP.tolerance(torch.float32))


@every_run
def test_an_empty_batch_gives_empty_results(device, backend):
    arguments = OP.inputs(CASES["uneven"], device=device)
    per_sequence = ("q", "page_table", "context_lens", "ancestor_bits", "tree_sizes")
    none = arguments | {key: arguments[key][:0] for key in per_sequence}

    out, lse = OP.implementations[backend](**none)

    assert out.shape == (0, *arguments["q"].shape[1:3], CASES["uneven"].value_dim)
    assert lse.shape == out.shape[:3]


@pytest.mark.skipif(INTERPRETED, reason="nothing of it runs in the interpreter")
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kv_pages": torch.zeros(4, 16, 31)}, r"kv_pages: expected shape \[any, any, 32\]"),
        ({"kv_pages": torch.zeros(4, 16, 32).double()}, "kv_pages: expected dtype float32"),
        ({"q": torch.zeros(4, 17, 32, 3).mT}, "q: expected a contiguous last dim"),
        ({"page_table": torch.zeros(4, 9)}, "page_table: expected dtype int32"),
        (
            {"context_lens": torch.zeros(3, dtype=torch.int32)},
            r"context_lens: expected shape \[4\]",
        ),
        ({"ancestor_bits": torch.zeros(4, 17, 0, dtype=torch.int32)}, "at least 1 words"),
        ({"tree_sizes": torch.tensor([1, 1, 1, 18])}, r"a tree of 1\.\.17, got 40 and 18"),
        ({"context_lens": torch.tensor([131, 2, 0, 999])}, "room for 1016 rows of sequence 3"),
        ({"value_dim": 33}, r"value_dim: expected 1\.\.32"),
        ({"num_splits": 0}, "num_splits: expected at least 1, got 0"),
        ({"tree_kv": torch.zeros(4, 16, 32)}, r"tree_kv: expected shape \[4, 17, 32\]"),
        ({"out": torch.zeros(4, 17, 3, 15)}, "out: expected shape"),
        ({"lse": torch.zeros(4, 17, 3).double()}, "lse: expected dtype float32"),
    ],
)
def test_operands_that_do_not_fit_are_refused_by_name(change, message):
    arguments = OP.inputs(CASES["uneven"]) | change

    with pytest.raises(ShapeError, match=message):
        OP.reference(**arguments)


@pytest.mark.skipif(INTERPRETED, reason="nothing of it runs in the interpreter")
def test_an_unknown_backend_is_refused_with_the_names_there_are():
    with pytest.raises(BackendError, match=r"expected one of reference, .*got 'flash'"):
        tree_attention(**OP.inputs(CASES["root-only"]), backend="flash")


@pytest.mark.skipif(INTERPRETED, reason="nothing of it runs in the interpreter")
@pytest.mark.parametrize("option", [{"kv_scales": torch.ones(3)}, {"num_splits": 2}])
def test_an_option_the_backend_has_no_use_for_is_refused(option):
    with pytest.raises(BackendError, match="expected None"):
        OP.reference(**OP.inputs(CASES["root-only"]), **option)


@pytest.mark.skipif(INTERPRETED, reason="in the interpreter it runs on the CPU")
@pytest.mark.parametrize("backend", TRITON_BACKENDS)
def test_a_triton_backend_refuses_tensors_of_the_cpu(backend):
    with pytest.raises(BackendError, match=f"{backend}: expected CUDA tensors, got cpu"):
        OP.implementations[backend](**OP.inputs(CASES["root-only"]))


if INTERPRETED:

    @pytest.mark.parametrize("backend", TRITON_BACKENDS)
    @pytest.mark.parametrize(
        ("dtype", "change", "message"),
        [
            (torch.float64, {}, "expected bfloat16, float16 or float32 rows, got torch.float64"),
            (torch.bfloat16, {}, "float16 or float32 rows in Triton's interpreter"),
            (torch.float32, {"value_dim": 24}, "expected value_dim to be a power of two"),
            (torch.float32, {"value_dim": 32}, "expected rope_dim to be a power of two"),
        ],
    )
    def test_a_triton_backend_refuses_what_its_tiles_cannot_hold(backend, dtype, change, message):
        with pytest.raises(BackendError, match=message):
            OP.implementations[backend](**OP.inputs(CASES["root-only"], dtype=dtype) | change)

    def test_a_workspace_that_is_too_small_is_refused():
        arguments = OP.inputs(CASES["root-only"])

        with pytest.raises(ShapeError, match=r"workspace: expected at least 102 .* got 101"):
            OP.implementations["triton_split"](
                **arguments, num_splits=3, workspace=torch.empty(101)
            )

    def test_launched_programs_are_counted_for_the_kernel_that_reads_the_rows():
        arguments = OP.inputs(CASES["word-edge"])  # 3 sequences, 2 heads, 33 tokens in blocks of 16

        assert launched_programs(**arguments, backend="triton_serial") == 3 * 2 * 3
        # ⌈33 * 2 / 32⌉ blocks of packed rows
        assert launched_programs(**arguments, backend="triton_split", num_splits=5) == 3 * 3 * 5
        with pytest.raises(BackendError, match="got 'reference'"):
            launched_programs(**arguments, backend="reference")


if not INTERPRETED:

    def test_triton_backends_pass_this_file_in_the_interpreter():
        assert_passes_in_the_interpreter(__file__)


@pytest.mark.skipif(INTERPRETED, reason="nothing of it runs in the interpreter")
def test_cost_counts_every_row_once_and_every_visible_pair():
    case = replace(
        CASES["root-only"], context_lens=(10,), trees=((-1, 0, 0),), num_heads=2, page_size=16
    )

    cost = OP.cost(case, itemsize=2)

    assert cost.kv_bytes == (10 + 3) * 32 * 2
    assert cost.bytes == cost.kv_bytes + 3 * 2 * ((32 + 16) * 2 + 4) + 4 * 1
    assert cost.flops == 2 * (10 * 3 + (1 + 2 + 2)) * 2 * (32 + 16)


@pytest.mark.parametrize(
    ("backend", "num_splits", "programs"),
    # one program a head; ⌈9 * 8 / 32⌉ blocks of packed rows
    [("triton_serial", None, 8), ("triton_split", 33, 99)],
)
def test_programs_of_the_incidents_shape_are_counted(backend, num_splits, programs):
    case = TreeAttentionCase("", "", context_lens=(300,), trees=(bush(9, 0),), num_heads=8)
    arguments = inputs(case) | {"num_splits": num_splits}

    assert launched_programs(**arguments, backend=backend) == programs
