"""The router's choice: the reference against plain loops, the kernel against the reference.

As attention_runs.py says, the Triton backend runs in Triton's interpreter and on a CUDA device.
"""

import math
from pathlib import Path

import pytest
import torch

from engine.errors import BackendError, ShapeError
from engine.kernels import OPS, choose_experts
from tests.attention_runs import INTERPRETED, captured, not_interpreted
from tests.interpreter import assert_passes_in_the_interpreter
from tests.op_runs import every_kernel_run, runs_of

OP = OPS["choose_experts"]
CASES = {case.name: case for case in OP.cases}
RUNS = runs_of(OP)
every_run, every_case = RUNS.every_run, RUNS.every_case


def by_hand(arguments):
    """Ids and weights of every row in plain Python, in float64; equals go to the lower expert."""
    logits, bias = arguments["logits"].double().tolist(), arguments["bias"].double().tolist()
    size = len(bias) // arguments["num_groups"]
    ids, weights = [], []
    for row in logits:
        scores = [1.0 / (1.0 + math.exp(-value)) for value in row]
        priority = [s + b for s, b in zip(scores, bias, strict=True)]
        groups = [range(first, first + size) for first in range(0, len(bias), size)]
        if arguments["kept_groups"] < len(groups):
            groups.sort(key=lambda own: -sum(sorted(priority[e] for e in own)[-2:]))
            groups = groups[: arguments["kept_groups"]]
        known = sorted((e for own in groups for e in own), key=lambda e: (-priority[e], e))
        chosen = known[: arguments["top_k"]]
        total = sum(scores[e] for e in chosen) if arguments["is_normalised"] else 1.0
        ids.append(chosen)
        weights.append([scores[e] / (total + 1e-20) * arguments["scaling"] for e in chosen])
    return torch.tensor(ids), torch.tensor(weights, dtype=torch.float64)


@every_case
@every_run
def test_every_backend_chooses_what_the_definition_says(case, device, backend):
    arguments = OP.inputs(case, device=device)
    ids, weights = by_hand(OP.inputs(case))

    choice = OP.implementations[backend](**arguments)

    assert (choice.expert_ids.dtype, choice.expert_weights.dtype) == (torch.int64, torch.float32)
    if case.name != "sharp":  # equal scores of 0 and 1: any order of them is a definition's
        assert choice.expert_ids.tolist() == ids.tolist()
    error = (choice.expert_weights.cpu().double().sort().values - weights.sort().values).abs()
    assert (error <= 3 * OP.tolerance(torch.float32).output_rel * weights.abs().amax()).all()


@every_run
def test_rows_choose_alike_in_any_company(device, backend):
    arguments = OP.inputs(CASES["many-rows"], device=device)
    together = OP.implementations[backend](**arguments)
    order = torch.arange(39, -1, -1, device=device)

    backwards = OP.implementations[backend](
        **arguments | {"logits": arguments["logits"][order].contiguous()}
    )

    assert torch.equal(backwards.expert_ids, together.expert_ids[order])
    assert torch.equal(backwards.expert_weights, together.expert_weights[order])


@every_run
def test_no_rows_choose_nothing(device, backend):
    arguments = OP.inputs(CASES["odd"], device=device)

    choice = OP.implementations[backend](**arguments | {"logits": arguments["logits"][:0]})

    assert choice.expert_ids.shape == choice.expert_weights.shape == (0, 3)


@every_kernel_run
def test_the_kernel_gives_equals_to_the_lower_expert(device):
    logits, bias = torch.zeros(2, 12, device=device), torch.zeros(12, device=device)
    logits[1, 7:] = 1.0

    plain = choose_experts(logits, bias, top_k=3, backend="triton")
    grouped = choose_experts(logits, bias, top_k=3, num_groups=4, kept_groups=1, backend="triton")

    assert plain.expert_ids.tolist() == [[0, 1, 2], [7, 8, 9]]
    assert grouped.expert_ids.tolist() == [[0, 1, 2], [7, 8, 6]]


@every_kernel_run
def test_rows_of_no_numbers_choose_no_expert_that_exists(device):
    logits = torch.full((1, 12), torch.nan, device=device)

    for groups in ({}, {"num_groups": 4, "kept_groups": 2}):
        choice = choose_experts(
            logits, torch.zeros(12, device=device), top_k=2, backend="triton", **groups
        )
        assert choice.expert_ids.tolist() == [[12, 12]]


if INTERPRETED:

    def test_triton_refuses_float64():
        with pytest.raises(BackendError, match=r"expected float32 logits, got torch\.float64"):
            OP.implementations["triton"](**OP.inputs(CASES["odd"], dtype=torch.float64))


if not INTERPRETED:

    def test_triton_passes_this_file_and_its_neighbours_in_the_interpreter():
        # In one process: to start one takes longer than either of these.
        names = (
            *("mla_rows", "add_norm", "head_rows", "keep_rows", "attend_window"),
            *("likeliest_tokens", "greedy_tokens"),
        )
        beside = [Path(__file__).with_name(f"test_{name}.py") for name in names]
        assert_passes_in_the_interpreter(__file__, *beside)

    def test_triton_refuses_a_cpu():
        with pytest.raises(BackendError, match="expected CUDA tensors, got cpu ones"):
            OP.implementations["triton"](**OP.inputs(CASES["odd"]))


@not_interpreted
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"top_k": 0}, r"top_k: expected 1\.\.12, got 0"),
        ({"top_k": 13}, r"top_k: expected 1\.\.12, got 13"),
        ({"top_k": 4, "num_groups": 4, "kept_groups": 1}, r"top_k: expected 1\.\.3, got 4"),
        ({"num_groups": 5}, "expected a divisor of 12 and at most it, got 5 and 1"),
        ({"num_groups": 4, "kept_groups": 5}, "got 4 and 5"),
        ({"num_groups": 12, "kept_groups": 4}, "expected groups of 2 experts or more, got 1"),
        ({"bias": torch.zeros(11)}, r"bias: expected shape \[12\], got \[11\]"),
        ({"logits": torch.zeros(2, 12, dtype=torch.bfloat16)}, "logits: expected dtype float32 or"),
    ],
)
def test_choices_that_cannot_be_made_are_refused(changes, message):
    arguments = {"logits": torch.zeros(2, 12), "bias": torch.zeros(12), "top_k": 3}

    with pytest.raises(ShapeError, match=message):
        choose_experts(**arguments | changes, backend="reference")


@not_interpreted
def test_an_unknown_backend_is_refused():
    with pytest.raises(BackendError, match="router backend: expected one of reference, triton"):
        choose_experts(torch.zeros(1, 2), torch.zeros(2), top_k=1, backend="cuda")


@not_interpreted
def test_cost_counts_logits_and_choices():
    case = CASES["groups"]

    assert OP.cost(case, itemsize=2).bytes == 10 * 16 * 4 + 9 * 3 * (8 + 4)


@every_kernel_run
def test_a_graph_replays_other_logits(device):
    arguments = OP.inputs(CASES["groups"], device=device)
    kept = []
    replay = captured(lambda: kept.append(OP.implementations["triton"](**arguments)), device)
    for seed in (3, 4):
        generator = torch.Generator().manual_seed(seed)
        arguments["logits"].copy_(torch.randn(9, 16, generator=generator))
        expected = OP.reference(**arguments)
        replay()
        assert torch.equal(kept[-1].expert_ids, expected.expert_ids)
