"""Tree attention: the reference against a second formulation, every backend against the reference.

As attention_runs.py says, the Triton backends run in Triton's interpreter and on a CUDA device.
"""

from dataclasses import replace

import pytest
import torch

from engine.config import PAGE_SIZES
from engine.errors import BackendError, ShapeError
from engine.kernels import (
    OPS,
    TreeAttentionCase,
    default_num_splits,
    launched_programs,
    tree_attention,
    workspace_size,
)
from engine.kernels.tree_attention.cases import bush, inputs
from tests.attention_runs import (
    INTERPRETED,
    ON_GPU,
    PLAIN_RUNS,
    SPLIT_DEVICES,
    TRITON_BACKENDS,
    assert_close,
    call,
    every_run,
    in_float64,
    in_numbers,
    not_interpreted,
)
from tests.interpreter import assert_passes_in_the_interpreter

OP = OPS["tree_attention"]
CASES = {case.name: case for case in OP.cases}
# Where the rows of a sequence are cut does not depend on the sequences before it.
CUT_BY_LENGTHS_ALONE = ("reference", *TRITON_BACKENDS)
FEW_CASES = ("strided", "hybrid", "production", "huge-scores")


def dtypes_of(case, device):
    """The interpreter cannot multiply bfloat16; on a device every dtype is a compilation."""
    few = (torch.float16, torch.float32) if case.name in FEW_CASES else ()
    if INTERPRETED and case.is_fp8:
        return {torch.float16}  # float32 queries beside wide fp8 rows are refused
    if INTERPRETED:
        return {torch.float32, *few}
    return (
        {torch.bfloat16, *few}
        if device == "cuda"
        else {torch.float32, torch.float16, torch.bfloat16}
    )


AGREEMENTS = [
    pytest.param(
        device, backend, case, dtype,
        marks=ON_GPU if device == "cuda" else (),
        id=f"{case.name}-{dtype}-{device}-{backend}",
    )
    for device, backend in PLAIN_RUNS
    for case in OP.cases
    for dtype in sorted(dtypes_of(case, device), key=str)
]  # fmt: skip
every_case = pytest.mark.parametrize("case", OP.cases, ids=lambda case: case.name)


def dense_attention(arguments):
    """Attend through torch's own attention, one query at a time over the rows it may see."""
    double = in_numbers(in_float64(arguments))
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


@every_case
@not_interpreted
def test_what_must_not_matter_is_made_to_hurt(case):
    arguments = in_numbers(OP.inputs(case))
    in_pages = [
        context + (0 if case.hybrid else size)
        for context, size in zip(case.context_lens, case.tree_sizes, strict=True)
    ]
    shared = case.shared_pages * case.page_size * (len(in_pages) - 1)

    pages, table = arguments["kv_pages"], arguments["page_table"]
    unused = [table[n, -(-rows // case.page_size) :] for n, rows in enumerate(in_pages)]

    assert (
        int(pages.isnan().all(-1).sum())
        == pages.shape[0] * case.page_size + shared - sum(in_pages)
        > 0
    )
    assert all(((ids < 0) | (ids >= len(pages))).all() and len(ids) for ids in unused)


@not_interpreted
def test_every_page_size_has_cases_in_both_layouts():
    assert {case.page_size for case in OP.cases} == set(PAGE_SIZES)
    assert {case.page_size for case in OP.cases if case.hybrid} >= {1, 16, 64, 128}


@every_case
@not_interpreted
def test_reference_is_dense_attention_over_visible_rows(case):
    arguments = OP.inputs(case, dtype=torch.float64)

    actual = OP.reference(**arguments)

    assert actual[1].dtype == torch.float64
    assert_close(actual, dense_attention(arguments), OP.tolerance(torch.float64, case.query_scale))


@pytest.mark.parametrize(("device", "backend", "case", "dtype"), AGREEMENTS)
def test_backend_agrees_with_the_reference(device, backend, case, dtype):
    arguments = OP.inputs(case, device=device, dtype=dtype)

    out, lse = call(backend, arguments)

    assert out.dtype == dtype
    assert lse.dtype == torch.float32
    tolerance = OP.tolerance(dtype, case.query_scale)
    assert_close((out, lse), OP.reference(**in_float64(arguments)), tolerance)


@every_run
@pytest.mark.parametrize("name", ["hybrid", "hybrid-edge64-page64"])
def test_backend_repeats_itself_to_the_bit(device, backend, name):
    arguments = OP.inputs(CASES[name], device=device)

    first = call(backend, arguments)
    again = call(backend, arguments)

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

    straight = call(backend, arguments)
    reordered = call(backend, permuted)

    permutation = tuple(result[order] for result in straight)
    assert_close(reordered, permutation, OP.tolerance(torch.float32))
    if backend in CUT_BY_LENGTHS_ALONE:
        assert all(torch.equal(a, b) for a, b in zip(permutation, reordered, strict=True))


@every_run
def test_caller_may_own_the_outputs(device, backend):
    case = CASES["strided"]
    arguments = OP.inputs(case, device=device)
    expected = call(backend, arguments)
    wide_out = torch.full((*expected[0].shape[:3], 48), torch.nan, device=device)
    wide_lse = torch.full((*expected[1].shape, 2), torch.nan, device=device)
    out, lse = wide_out[..., : case.value_dim], wide_lse[..., 0]

    returned = call(backend, arguments, out=out, lse=lse)

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

    out, lse = call(backend, none)

    assert out.shape == (0, *arguments["q"].shape[1:3], CASES["uneven"].value_dim)
    assert lse.shape == out.shape[:3]


@not_interpreted
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
        ({"num_splits": 0}, r"num_splits: expected 1\.\.65535, got 0"),
        ({"tree_kv": torch.zeros(4, 16, 32)}, r"tree_kv: expected shape \[4, 17, 32\]"),
        ({"out": torch.zeros(4, 17, 3, 15)}, "out: expected shape"),
        ({"lse": torch.zeros(4, 17, 3).double()}, "lse: expected dtype float32"),
    ],
)
def test_operands_that_do_not_fit_are_refused_by_name(change, message):
    arguments = OP.inputs(CASES["uneven"]) | change

    with pytest.raises(ShapeError, match=message):
        OP.reference(**arguments)


@not_interpreted
def test_an_unknown_backend_is_refused_with_the_names_there_are():
    with pytest.raises(BackendError, match=r"expected one of reference, .*got 'flash'"):
        tree_attention(**OP.inputs(CASES["root-only"]), backend="flash")


@not_interpreted
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

    @pytest.mark.parametrize(
        ("name", "dtype", "change", "message"),
        [
            ("fp8-groups", torch.float32, {}, "float16 queries beside fp8 rows of 256 values"),
            (
                "fp8",
                torch.float16,
                {"row_gap": 1},
                "kv_pages to begin at, and step by, multiples of 4",
            ),
            ("fp8-hybrid", torch.float16, {"row_gap": 2}, "multiples of 4 bytes"),
        ],
    )
    def test_fp8_rows_that_cannot_be_read_once_are_refused(name, dtype, change, message):
        arguments = OP.inputs(replace(CASES[name], **change), dtype=dtype)

        with pytest.raises(BackendError, match=message):
            OP.implementations["triton_split"](**arguments)

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
        with pytest.raises(BackendError, match=r"launched programs: .*got 'reference'"):
            launched_programs(**arguments, backend="reference")


if not INTERPRETED:

    def test_triton_backends_pass_this_file_in_the_interpreter():
        assert_passes_in_the_interpreter(__file__)


@not_interpreted
def test_cost_counts_every_operand_once_and_every_visible_pair():
    case = replace(
        CASES["root-only"], context_lens=(10,), trees=((-1, 0, 0),), num_heads=2, page_size=16
    )

    cost = OP.cost(case, itemsize=2)

    assert cost.kv_bytes == (10 + 3) * 32 * 2
    ints = 1 + 3 + 2  # page ids, mask words, the two lengths
    assert cost.bytes == cost.kv_bytes + 3 * 2 * ((32 + 16) * 2 + 4) + 4 * ints
    assert cost.flops == 2 * (10 * 3 + (1 + 2 + 2)) * 2 * (32 + 16)


@every_case
@not_interpreted
def test_cost_is_what_the_operands_hold(case):
    arguments = OP.inputs(case, dtype=torch.float16)
    row_bytes = arguments["kv_pages"].shape[-1] * arguments["kv_pages"].itemsize
    pages, lse_bytes = in_numbers(arguments)["kv_pages"], 4
    rows = int((~pages.isnan().any(-1)).sum()) + sum(case.tree_sizes) * case.hybrid
    queries = int((~arguments["q"].isnan().any(-1)).sum())
    table = arguments["page_table"]
    ids = int(((table >= 0) & (table < len(pages))).sum())
    words = sum(-(-size // 32) * size for size in case.tree_sizes)

    cost = OP.cost(case, itemsize=2)

    assert cost.kv_bytes == rows * row_bytes
    per_query = (case.latent_dim + case.value_dim) * 2 + lse_bytes
    ints = 4 * (ids + words + 2 * len(case.trees))
    assert cost.bytes - cost.kv_bytes == queries * per_query + ints
    pairs = sum(
        len(tree) * context + sum(len(ancestors(tree, node)) for node in range(len(tree)))
        for context, tree in zip(case.context_lens, case.trees, strict=True)
    )
    assert cost.flops == 2 * pairs * case.num_heads * (case.latent_dim + case.value_dim)


def ancestors(tree, node):
    return [node, *ancestors(tree, tree[node])] if node >= 0 else []


@not_interpreted
def test_default_splits_follow_the_bucket_and_not_the_lengths():
    case = replace(CASES["uneven"], page_size=16)
    arguments = OP.inputs(case)
    shorter = arguments | {"context_lens": torch.zeros_like(arguments["context_lens"])}
    one = replace(case, context_lens=(0,), trees=((-1,),), num_heads=1)
    short, long = (OP.inputs(replace(one, context_lens=(size,))) for size in (64, 640))
    counts = [
        default_num_splits(**each, backend="triton_split")
        for each in (arguments, shorter, short, long)
    ]

    assert counts[0] == counts[1]
    assert counts[2] < counts[3]


@not_interpreted
def test_a_workspace_of_the_size_it_is_said_to_need_is_accepted():
    arguments = OP.inputs(CASES["uneven"])

    floats = workspace_size(**arguments, backend="triton_split", num_splits=3)

    assert floats == 3 * arguments["q"].shape[:3].numel() * (16 + 1)
    with pytest.raises(BackendError, match="workspace: expected a backend that has such"):
        workspace_size(**arguments, backend="reference")
    with pytest.raises(BackendError, match=r"number of splits: expected .*got 'triton_serial'"):
        default_num_splits(**arguments, backend="triton_serial")


@pytest.mark.parametrize(
    ("backend", "num_splits", "programs"),
    # one program a head; ⌈9 * 8 / 32⌉ blocks of packed rows
    [("triton_serial", None, 8), ("triton_split", 33, 99)],
)
def test_programs_of_the_incidents_shape_are_counted(backend, num_splits, programs):
    case = TreeAttentionCase("", "", context_lens=(300,), trees=(bush(9, 0),), num_heads=8)
    arguments = inputs(case) | {"num_splits": num_splits}

    assert launched_programs(**arguments, backend=backend) == programs
