"""Experts chosen in their own call: the reference by its parts, the kernels against the reference.

The kernels are CUDA C++: they run on a device only (marker gpu).
"""

import pytest
import torch

from engine.errors import BackendError, ShapeError
from engine.kernels import OPS, RoutedExpertsCase, grouped_experts, routed_experts, skinny_linear
from engine.kernels.grouped_experts.cases import INT4, expert_ids
from tests.attention_runs import ON_GPU, captured, not_interpreted

pytestmark = not_interpreted
OP = OPS["routed_experts"]
CASES = {case.name: case for case in OP.cases}
PACKED = [case for case in (*OP.cases, *OP.production) if case.stored == INT4]
OPERANDS = ("gate", "up", "down", "gate_scale", "up_scale", "down_scale")
on_gpu = pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_GPU)])


def errors(got, wanted):
    return (got.double() - wanted.double()).norm(dim=-1) / wanted.double().norm(dim=-1)


def experts_of(arguments):
    return {name: arguments[name] for name in OPERANDS if name in arguments}


@pytest.mark.parametrize("case", OP.cases, ids=lambda case: case.name)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_rows_get_the_experts_of_their_largest_logits(case, dtype):
    arguments = OP.inputs(case, dtype=dtype)
    ids = expert_ids(case.experts)
    scores = arguments["logits"].sigmoid().gather(1, ids)
    total = scores.sum(1, keepdim=True) if case.is_normalised else 1.0
    expected = grouped_experts(
        arguments["x"],
        ids,
        scores / total * case.scaling,
        **experts_of(arguments),
        backend="reference",
    )

    got = OP.reference(**arguments)

    assert got.dtype == dtype
    assert errors(got, expected).max() <= OP.tolerance(dtype).output_rel


def test_the_bias_moves_the_choice_and_never_the_weight():
    arguments = OP.inputs(CASES["plain"])
    favourite = int(arguments["logits"][0].argmin())
    arguments["bias"][favourite] = 100.0
    for name in OPERANDS[:3]:  # of experts that nobody chose before
        arguments[name] = arguments[name].nan_to_num(0.5)
    ids = torch.full((5, 1), favourite)
    scores = arguments["logits"].sigmoid().gather(1, ids)
    alone = grouped_experts(
        arguments["x"], ids, scores * 2.5, **experts_of(arguments), backend="reference"
    )

    got = OP.reference(**arguments | {"top_k": 1, "is_normalised": False})

    assert errors(got, alone).max() <= 1e-6


@pytest.mark.parametrize("case", PACKED, ids=lambda case: case.name)
@on_gpu
def test_the_kernels_give_what_the_reference_gives_and_repeat_it(case, device):
    arguments = OP.inputs(case, device=device, dtype=torch.bfloat16)
    expected = OP.reference(**arguments)
    torch.cuda.synchronize()

    first = OP.implementations["cuda"](**arguments)

    assert errors(first, expected).max() <= OP.tolerance(torch.bfloat16).output_rel
    assert torch.equal(OP.implementations["cuda"](**arguments), first)


@on_gpu
@pytest.mark.parametrize("num_rows", [1, 9, 32])
def test_a_graph_chooses_beside_the_launch_ahead(device, num_rows):
    """As in a layer: router, a product that is not asked for, then experts that do not wait for it."""
    case = RoutedExpertsCase("", "", num_rows, 96, 8, 512, 256, INT4)
    arguments = OP.inputs(case, device=device, dtype=torch.bfloat16)
    for name in OPERANDS[3:]:  # other rows choose other experts
        arguments[name] = arguments[name].nan_to_num(0.01)
    generator = torch.Generator().manual_seed(1)
    router = torch.randn(96, 512, generator=generator).to(device).bfloat16() / 8
    beside = torch.randn(7168, 512, generator=generator).to(device).bfloat16() / 23
    results = {}

    def layer(backend):
        logits = skinny_linear(arguments["x"], router, out_dtype=torch.float32, backend=backend)
        made = skinny_linear(arguments["x"], beside, backend=backend)
        rest = arguments | {"logits": logits, "logits_are_there": True}
        results[backend] = made, OP.implementations[backend](**rest)

    torch.cuda.synchronize()
    replay = captured(lambda: layer("cuda"), device)
    for _ in range(5):
        arguments["x"].copy_(torch.randn(num_rows, 512, generator=generator))
        layer("reference")

        replay()

        for got, wanted in zip(results["cuda"], results["reference"], strict=True):
            assert errors(got, wanted).max() <= OP.tolerance(torch.bfloat16).output_rel


@on_gpu
def test_equals_go_to_the_lower_expert_and_no_numbers_to_none(device):
    arguments = OP.inputs(CASES["packed"], device=device, dtype=torch.bfloat16)
    for name in OPERANDS[3:]:
        arguments[name] = arguments[name].nan_to_num(0.01)
    arguments["bias"].zero_()
    arguments["logits"].zero_()
    arguments["logits"][3] = torch.nan
    lowest = torch.arange(3, device=device).expand(9, 3)
    weights = torch.full((9, 3), 2.5 / 3, device=device)
    expected = grouped_experts(
        arguments["x"], lowest, weights, **experts_of(arguments), backend="reference"
    )

    got = OP.implementations["cuda"](**arguments)

    numbers = torch.arange(9, device=device) != 3
    assert errors(got[numbers], expected[numbers]).max() <= 2e-2
    assert (got[3] == 0).all()


@on_gpu
def test_the_kernels_refuse_more_choices_than_a_block_remembers(device):
    case = RoutedExpertsCase("", "", 200, 16, 8, 256, 256, INT4)
    arguments = OP.inputs(case, device=device, dtype=torch.bfloat16)

    with pytest.raises(BackendError, match="at most 1024 choices and 32 of a row, got 200 rows"):
        OP.implementations["cuda"](**arguments)


def test_the_kernels_refuse_a_cpu():
    with pytest.raises(BackendError, match="expected a GPU of one of the architectures"):
        OP.implementations["cuda"](**OP.inputs(CASES["packed"], dtype=torch.bfloat16))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"logits": torch.zeros(5, 7)}, r"bias: expected shape \[7\]"),
        ({"logits": torch.zeros(4, 8)}, r"expert_ids: expected shape \[5, any\]"),
        ({"logits": torch.zeros(5, 7), "bias": torch.zeros(7)}, r"logits: expected shape \[5, 8\]"),
        ({"top_k": 9}, r"top_k: expected 1\.\.8, got 9"),
    ],
)
def test_operands_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ShapeError, match=message):
        OP.reference(**OP.inputs(CASES["plain"]) | changes)


def test_no_rows_give_no_rows():
    arguments = OP.inputs(CASES["plain"])
    none = {name: arguments[name][:0] for name in ("x", "logits")}

    assert routed_experts(**arguments | none, backend="reference").shape == (0, 64)


def test_cost_is_that_of_the_experts_and_the_logits():
    case = CASES["packed"]
    experts = OPS["grouped_experts"].cost(case.experts)

    assert OP.cost(case).bytes == experts.bytes + 4 * (9 * 40 + 40)
    assert OP.cost(case).flops == experts.flops
