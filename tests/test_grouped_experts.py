"""Grouped experts: the reference against plain loops, every backend against the reference.

As attention_runs.py says, the Triton backend runs in Triton's interpreter and on a CUDA device.
"""

from dataclasses import replace
from functools import partial

import pytest
import torch

from engine.config import EngineConfig
from engine.decoder import Engine
from engine.errors import BackendError, ShapeError
from engine.kernels import (
    OPS,
    GroupedExpertsCase,
    experts_programs,
    experts_workspace_size,
    grouped_experts,
)
from engine.kernels.grouped_experts.cases import INT4, PLAIN, expert_ids
from engine.presets import preset
from engine.quantized import Fp8BlockWeight, Int4GroupWeight
from tests.attention_runs import INTERPRETED, ON_GPU, captured, not_interpreted
from tests.interpreter import assert_passes_in_the_interpreter
from tests.op_runs import every_kernel_run, runs_of

OP = OPS["grouped_experts"]
CASES = {case.name: case for case in OP.cases}
HALF_CASES = ("spread", "spread-int4", "int4-tail", "long-sums")
HALF_ONLY = ("int4-tail", "long-sums")  # tiles of float32 have too few inputs for them
RUNS = runs_of(OP)
every_run, every_case = RUNS.every_run, RUNS.every_case


def dtypes_of(case, device):
    """The interpreter cannot multiply bfloat16 and is slow; a device compiles for each dtype."""
    if INTERPRETED:
        halves = {torch.float16} if case.name in HALF_CASES else set()
        return halves if case.name in HALF_ONLY else halves | {torch.float32}
    if device == "cpu":
        return {torch.float32, torch.float16, torch.bfloat16}
    return {torch.bfloat16, *({torch.float16, torch.float32} if case.name in HALF_CASES else ())}


AGREEMENTS = [
    pytest.param(
        device, backend, case, dtype,
        marks=ON_GPU if device == "cuda" else (),
        id=f"{case.name}-{dtype}-{device}-{backend}",
    )
    for device, backend in RUNS.plain
    for case in OP.cases
    for dtype in sorted(dtypes_of(case, device), key=str)
]  # fmt: skip


def in_float64(arguments):
    """The same values, rows and sums in float64; scales keep the dtype products are rounded to."""
    return {
        name: value.double() if value.is_floating_point() and "scale" not in name else value
        for name, value in arguments.items()
    }


def assert_close(actual, expected, tolerance):
    assert actual.shape == expected.shape
    assert actual.isfinite().all()
    error = (actual.double() - expected.double()).norm(dim=-1)
    size = expected.double().norm(dim=-1)
    assert (error <= tolerance.output_rel * size).all(), (error / size).nan_to_num().max()


def numbers(arguments, name):
    """One projection as plain float64 numbers, unpacked by the checkpoint's reader."""
    values = arguments[name]
    if values.dtype == torch.int32:
        return Int4GroupWeight(values, arguments[f"{name}_scale"]).dequantize(torch.float64)
    return values.double()


def loops(arguments):
    """Sum over rows and choices one by one."""
    gate, up, down = (numbers(arguments, name) for name in ("gate", "up", "down"))
    x, out = arguments["x"].double(), torch.zeros(arguments["x"].shape, dtype=torch.float64)
    for m, ids in enumerate(arguments["expert_ids"].tolist()):
        for k, e in enumerate(ids):
            if e >= 0:
                a = gate[e] @ x[m]
                h = a / (1 + (-a).exp()) * (up[e] @ x[m])
                out[m] += arguments["expert_weights"][m, k].double() * (down[e] @ h)
    return out


@every_case
@not_interpreted
def test_reference_is_a_loop_over_rows_and_choices(case):
    arguments = OP.inputs(case)
    few = slice(case.num_rows - 20 if case.num_rows > 20 else 0, None)
    cut = {name: arguments[name][few] for name in ("x", "expert_ids", "expert_weights")}
    arguments = in_float64(arguments | cut)

    assert_close(OP.reference(**arguments), loops(arguments), OP.tolerance(torch.float64))


@every_case
@not_interpreted
def test_what_must_not_matter_is_made_to_hurt(case):
    arguments = OP.inputs(case)
    hit = set(expert_ids(case).flatten().tolist()) - {-1}
    idle = [expert for expert in range(case.num_experts) if expert not in hit]

    assert arguments["x"][case.num_rows - case.padding_rows :].isnan().all()
    for name in ("gate", "up", "down"):
        felt = arguments[name if case.stored == PLAIN else f"{name}_scale"]
        assert felt[idle].isnan().all()
        assert felt[sorted(hit)].isfinite().all()


@pytest.mark.parametrize(("device", "backend", "case", "dtype"), AGREEMENTS)
def test_backend_agrees_with_the_reference(device, backend, case, dtype):
    arguments = OP.inputs(case, device=device, dtype=dtype)

    out = OP.implementations[backend](**arguments)

    assert out.dtype == dtype
    assert_close(out, OP.reference(**in_float64(arguments)), OP.tolerance(dtype))


@every_run
@pytest.mark.parametrize("name", ["spread", "repeated"])
def test_backend_repeats_itself_to_the_bit(device, backend, name):
    arguments = OP.inputs(CASES[name], device=device)

    first, again = (OP.implementations[backend](**arguments) for _ in range(2))

    assert torch.equal(first, again)


@every_run
def test_order_of_the_rows_does_not_matter(device, backend):
    arguments = OP.inputs(CASES["spread"], device=device)
    order = torch.arange(8, -1, -1, device=device)
    per_row = ("x", "expert_ids", "expert_weights")
    permuted = arguments | {name: arguments[name][order] for name in per_row}

    straight, reordered = (OP.implementations[backend](**each) for each in (arguments, permuted))

    assert_close(reordered, straight[order], OP.tolerance(torch.float32))


@every_kernel_run
@pytest.mark.parametrize(("name", "num_splits"), [("spread", 2), ("spread-int4", 3)])
def test_number_of_splits_does_not_change_the_result(device, name, num_splits):
    arguments = OP.inputs(CASES[name], device=device)

    out = OP.implementations["triton"](**arguments, num_splits=num_splits)

    assert_close(out, OP.reference(**arguments), OP.tolerance(torch.float32))


@every_kernel_run
def test_a_captured_call_serves_any_routing_of_its_rows(device):
    """Buffers of the caller, poisoned before each replay; ids as int32 with strides of their own."""
    case = CASES["spread"]
    arguments = OP.inputs(replace(case, routing="one"), device=device)
    wide_ids = torch.full((9, 4), -7, dtype=torch.int32, device=device)
    ids, out = wide_ids[:, ::2], torch.empty(9, 96, device=device)[:, :64]
    arguments |= {"expert_ids": ids, "gate": arguments["gate"].nan_to_num(0.1)}
    arguments |= {name: arguments[name].nan_to_num(0.1) for name in ("up", "down")}
    size = experts_workspace_size(**arguments, backend="triton")
    workspace = torch.full((size,), torch.nan, device=device)
    ids.copy_(expert_ids(replace(case, routing="one")))
    replay = captured(
        partial(OP.implementations["triton"], **arguments, out=out, workspace=workspace), device
    )

    for change in ({}, {"routing": "one"}, {"routing": "ends"}, {"padding_rows": 5, "seed": 3}):
        chosen = expert_ids(replace(case, **change))
        ids.copy_(chosen)
        out.fill_(torch.nan)
        workspace.fill_(torch.nan)
        replay()

        expected = OP.reference(**arguments | {"expert_ids": chosen.to(device)})
        assert_close(out, expected, OP.tolerance(torch.float32))


@every_run
def test_caller_may_own_the_result(device, backend):
    arguments = OP.inputs(CASES["one-expert"], device=device)
    expected = OP.implementations[backend](**arguments)
    wide = torch.full((3, 80), torch.nan, device=device)

    returned = OP.implementations[backend](**arguments, out=wide[:, :64])

    assert returned.data_ptr() == wide.data_ptr()
    assert torch.equal(returned, expected)
    assert wide[:, 64:].isnan().all()


@every_run
def test_no_rows_give_no_rows(device, backend):
    arguments = OP.inputs(CASES["spread"], device=device)
    per_row = ("x", "expert_ids", "expert_weights")
    none = arguments | {name: arguments[name][:0] for name in per_row}

    assert OP.implementations[backend](**none).shape == (0, 64)


@not_interpreted
@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("spread", {"x": torch.zeros(9, 64, dtype=torch.int64)}, "x: expected dtype float16 or"),
        ("spread", {"x": torch.zeros(64, 9).T}, "x: expected a contiguous last dim"),
        ("spread", {"x": torch.zeros(9, 63)}, r"gate: expected shape \[8, 32, 63\]"),
        ("spread", {"x": torch.zeros(9, 64).half()}, "expert_weights|gate: expected dtype"),
        ("spread", {"expert_ids": torch.zeros(8, 2).long()}, r"expert_ids: expected shape \[9, any"),
        ("spread", {"expert_ids": torch.zeros(9, 2)}, "expert_ids: expected dtype int32 or int64"),
        ("spread", {"expert_ids": torch.full((9, 2), 8)}, r"expected -1 \(none\) or 0\.\.7, got 8"),
        ("spread", {"expert_ids": torch.full((9, 2), -2)}, "expected -1 .* got -2"),
        ("spread", {"expert_weights": torch.zeros(9, 2).half()}, "expert_weights: expected dtype"),
        ("spread", {"expert_weights": torch.zeros(9, 3)}, r"expert_weights: expected shape \[9, 2\]"),
        ("spread", {"up": torch.zeros(8, 31, 64)}, r"up: expected shape \[8, 32, 64\]"),
        ("spread", {"down": torch.zeros(8, 32, 64)}, r"down: expected shape \[8, 64, 32\]"),
        ("spread", {"down_scale": torch.zeros(8, 64, 1)}, "down_scale, block: expected None"),
        ("spread", {"block": (1, 32)}, "gate_scale, block: expected None beside plain"),
        ("spread", {"out": torch.zeros(9, 65)}, r"out: expected shape \[9, 64\]"),
        ("spread", {"num_splits": 0}, r"num_splits: expected 1\.\.65535, got 0"),
        ("spread-int4", {"up_scale": None}, "up_scale: expected a tensor beside torch.int32"),
        ("spread-int4", {"block": (1, 32)}, "block: expected None beside int4"),
        ("spread-int4", {"gate_scale": torch.zeros(8, 32, 3)}, "gate_scale: expected groups of"),
        ("spread-int4", {"gate_scale": torch.zeros(8, 32, 0)}, "gate_scale: expected groups of"),
        ("spread-int4", {"gate_scale": torch.zeros(8, 32, 2).double()}, "gate_scale: expected dtype"),
        ("spread-int4", {"down": torch.zeros(8, 64, 32)}, r"down: expected shape \[8, 64, 4\]"),
    ],
)  # fmt: skip
def test_operands_that_do_not_fit_are_refused_by_name(name, change, message):
    with pytest.raises(ShapeError, match=message):
        OP.reference(**OP.inputs(CASES[name]) | change)


@not_interpreted
def test_operands_on_two_devices_are_refused():
    arguments = OP.inputs(CASES["spread"])

    with pytest.raises(ShapeError, match="operands: expected all on cpu, got one on meta"):
        OP.reference(**arguments | {"down": arguments["down"].to("meta")})


@not_interpreted
def test_a_backend_that_cannot_do_it_is_refused():
    arguments = OP.inputs(CASES["one-row"])

    with pytest.raises(BackendError, match="expected one of reference, triton, cuda, got 'marlin'"):
        grouped_experts(**arguments, backend="marlin")
    with pytest.raises(BackendError, match="num_splits, workspace: expected None"):
        OP.reference(**arguments, num_splits=2)
    with pytest.raises(BackendError, match="workspace: expected a backend that has such"):
        experts_workspace_size(**arguments, backend="reference")
    with pytest.raises(BackendError, match="triton: expected CUDA tensors, got cpu ones"):
        OP.implementations["triton"](**arguments)


@not_interpreted
def test_experts_in_fp8_blocks_are_what_the_checkpoints_reader_makes_of_them():
    arguments, generator = OP.inputs(CASES["all-to-one"]), torch.Generator().manual_seed(0)
    plain, block = dict(arguments), (24, 40)
    for name in ("gate", "up", "down"):
        values = arguments[name].nan_to_num().to(torch.float8_e4m3fn)
        _, rows, columns = values.shape
        shape = (8, -(-rows // block[0]), -(-columns // block[1]))
        weight = Fp8BlockWeight(values, torch.rand(shape, generator=generator), block)
        plain[name] = weight.dequantize(torch.float32)
        arguments |= {name: weight.values, f"{name}_scale": weight.scale_inv}

    assert torch.equal(OP.reference(**arguments, block=block), OP.reference(**plain))


if INTERPRETED:

    @pytest.mark.parametrize(
        ("name", "dtype", "change", "message"),
        [
            ("one-row", torch.float64, {}, "expected bfloat16, float16 or float32 rows"),
            ("one-row", torch.bfloat16, {}, "float16 or float32 rows in Triton's interpreter"),
            ("group-24", torch.float32, {}, "int4 ones in groups of a power of two up to 128"),
        ],
    )
    def test_triton_refuses_what_its_tiles_cannot_hold(name, dtype, change, message):
        odd = replace(CASES["spread-int4"], hidden=48, inner=48, group_size=24)
        case = odd if name == "group-24" else CASES[name]

        with pytest.raises(BackendError, match=message):
            OP.implementations["triton"](**OP.inputs(case, dtype=dtype) | change)

    def test_a_workspace_that_is_too_small_is_refused():
        arguments = OP.inputs(CASES["spread"])
        size = experts_workspace_size(**arguments, backend="triton")

        with pytest.raises(ShapeError, match=f"workspace: expected at least {size} contiguous"):
            OP.implementations["triton"](**arguments, workspace=torch.empty(size - 1))

    def test_an_engine_says_the_same_with_its_experts_in_triton():
        models = preset("tiny")
        engines = [
            Engine(models.target, None, EngineConfig(mode="ar", moe_backend=name))
            for name in ("reference", "triton")
        ]

        texts, logits = [], []
        for engine in engines:
            engine.target.head = recording(type(models.target).head, models.target, seen := [])
            texts.append(engine.generate([list(b"de")], max_new_tokens=1)[0])
            logits.append(torch.cat(seen))

        assert texts[0].token_ids == texts[1].token_ids
        torch.testing.assert_close(logits[1], logits[0], rtol=0, atol=1e-3)

    def recording(head, target, seen):
        def call(hidden):
            seen.append(head(target, hidden))
            return seen[-1]

        return call


if not INTERPRETED:

    def test_triton_passes_this_file_in_the_interpreter():
        assert_passes_in_the_interpreter(__file__)


@not_interpreted
def test_cost_counts_each_expert_that_is_hit_once():
    case = GroupedExpertsCase("", "", 4, num_experts=8, top_k=2, padding_rows=1)
    ids = torch.tensor([[1, 2], [2, 1], [2, 7], [-1, -1]])

    plain, packed = (
        OP.cost(replace(case, stored=stored), itemsize=2, ids=ids) for stored in (PLAIN, INT4)
    )

    around = (3 + 4) * 64 * 2 + 2 * 8 * 4  # rows that matter, all results, ids and weights
    assert plain.bytes == 3 * 3 * 64 * 32 * 2 + around
    assert packed.bytes == 3 * 3 * 64 * 32 * (4 + 16 / 32) / 8 + around
    assert plain.flops == packed.flops == 6 * 3 * 2 * 64 * 32


@every_case
@not_interpreted
def test_cost_is_what_the_operands_hold(case):
    arguments = OP.inputs(case, dtype=torch.float16)
    hit = sorted(set(expert_ids(case).flatten().tolist()) - {-1})
    stored = [name for name in arguments if name.split("_")[0] in ("gate", "up", "down")]
    weights = sum(arguments[name][hit].contiguous().nbytes for name in stored)
    rows = (2 * case.num_rows - case.padding_rows) * case.hidden * 2

    assert OP.cost(case).bytes == weights + rows + 2 * case.num_rows * case.top_k * 4


@not_interpreted
def test_a_rank_of_kimi_streams_what_its_floor_says():
    case = next(one for one in OP.production if one.name == "rank-int4-1")

    assert OP.cost(case).bytes == pytest.approx(24.8e6, rel=2e-3)


@pytest.mark.parametrize(
    ("case", "programs"),
    # eight tiles of one pair; nine rows of one choice on one expert fill at most one tile of 16
    [
        (GroupedExpertsCase("", "", 1, num_experts=384, top_k=8), 8),
        (GroupedExpertsCase("", "", 9, num_experts=1, top_k=1), 1),
        (GroupedExpertsCase("", "", 9, num_experts=384, top_k=8, inner=128), 72 * 2),
        (GroupedExpertsCase("", "", 1024, num_experts=8, top_k=1), (1024 + 8 * 15) // 16),
    ],
)
def test_programs_follow_from_the_shapes_and_leave_no_tile_out(case, programs):
    case = replace(case, is_one_expert=True, hidden=32)
    routings = ("spread", "one", "repeated") if case.num_experts > 1 else ("one",)
    counts = [
        experts_programs(**OP.inputs(replace(case, routing=routing)), backend="triton")
        for routing in routings
    ]

    assert set(counts) == {programs}
