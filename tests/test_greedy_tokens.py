"""The likeliest token of a row: the reference against plain Python, the kernels against both.

As attention_runs.py says, the Triton backend runs in Triton's interpreter, which test_choose_experts
starts for this file as well, and on a CUDA device.
"""

import math

import pytest
import torch

from engine.errors import BackendError, ShapeError
from engine.kernels import OPS, GreedyTokensCase, greedy_tokens
from engine.kernels.operands import NO_TOKEN
from engine.sampling import GREEDY, chosen_log_probs, tokens_or_none
from tests.attention_runs import ON_GPU, captured, not_interpreted
from tests.op_runs import every_kernel_run, runs_of

OP = OPS["greedy_tokens"]
CASES = {case.name: case for case in OP.cases}
RUNS = runs_of(OP)
every_run, every_case = RUNS.every_run, RUNS.every_case


@every_case
@every_run
def test_every_backend_says_what_the_definition_says(case, device, backend):
    arguments = OP.inputs(case, device=device)
    rows = arguments["logits"].double().tolist()

    said = OP.implementations[backend](**arguments)

    assert (said.tokens.dtype, said.log_probs.dtype) == (torch.int64, torch.float32)
    assert said.tokens.tolist() == [row.index(max(row)) for row in rows]
    totals = [math.log(math.fsum(math.exp(value - max(row)) for value in row)) for row in rows]
    expected = -torch.tensor(totals, dtype=torch.float64)
    size = arguments["logits"].abs().amax(-1).clamp(min=1.0).cpu()
    error = (said.log_probs.cpu().double() - expected).abs()
    assert (error <= OP.tolerance(torch.float32).output_rel * size).all()


@every_run
def test_it_is_how_greedy_tokens_are_chosen_without_it(device, backend):
    logits = OP.inputs(CASES["ties"], device=device)["logits"]

    said = greedy_tokens(logits, backend=backend)

    tokens = tokens_or_none(logits, torch.zeros(4).long(), 0, GREEDY)
    assert torch.equal(said.tokens, tokens)
    torch.testing.assert_close(said.log_probs, chosen_log_probs(logits, tokens))


@every_run
@pytest.mark.parametrize(
    ("value", "token"), [(torch.nan, 0), (-torch.nan, 2047), (torch.nan, 2500), (torch.inf, 2048)]
)
def test_a_row_that_is_no_distribution_has_no_token_and_spoils_no_other(
    device, backend, value, token
):
    arguments = OP.inputs(GreedyTokensCase("", "", 3, 2501), device=device)
    clean = OP.implementations[backend](**arguments)
    arguments["logits"][1, token] = value

    said = OP.implementations[backend](**arguments)

    assert int(said.tokens[1]) == NO_TOKEN
    assert torch.equal(said.tokens[::2], clean.tokens[::2])
    assert torch.equal(said.log_probs[::2], clean.log_probs[::2])


@every_run
def test_a_row_of_banned_tokens_has_none_and_a_row_but_one_has_that(device, backend):
    logits = torch.full((2, 4100), -torch.inf, device=device)
    logits[1, 4099] = torch.finfo(torch.float32).min

    said = greedy_tokens(logits, backend=backend)

    assert said.tokens.tolist() == [NO_TOKEN, 4099]
    assert float(said.log_probs[1]) == 0.0


@every_run
def test_zeros_of_both_signs_are_equals(device, backend):
    logits = torch.full((1, 4100), -1.0, device=device)
    logits[0, 3000:] = 0.0
    logits[0, 17] = -0.0

    assert greedy_tokens(logits, backend=backend).tokens.tolist() == [17]


@every_run
def test_rows_choose_alike_in_any_company(device, backend):
    logits = OP.inputs(CASES["ties"], device=device)["logits"]
    together = greedy_tokens(logits, backend=backend)

    alone = greedy_tokens(logits[3:4], backend=backend)

    assert torch.equal(alone.tokens, together.tokens[3:4])
    if backend == "triton":
        assert torch.equal(alone.log_probs, together.log_probs[3:4])


@every_run
def test_no_rows_choose_nothing(device, backend):
    said = greedy_tokens(torch.zeros(0, 9, device=device), backend=backend)

    assert said.tokens.shape == said.log_probs.shape == (0,)


@pytest.mark.parametrize("case", OP.production, ids=lambda case: case.name)
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_GPU)])
def test_the_shapes_that_are_served_have_the_tokens_of_the_reference(case, device):
    arguments = OP.inputs(case, device=device)
    arguments["logits"].mul_(8).round_().div_(8)
    expected = OP.reference(**arguments)

    said = OP.implementations["triton"](**arguments)

    assert torch.equal(said.tokens, expected.tokens)
    torch.testing.assert_close(said.log_probs, expected.log_probs, rtol=0, atol=2e-5)


@every_kernel_run
def test_a_graph_replays_other_logits(device):
    arguments = OP.inputs(CASES["part-and-one"], device=device)
    kept = []
    replay = captured(lambda: kept.append(OP.implementations["triton"](**arguments)), device)
    for seed in (3, 4):
        generator = torch.Generator().manual_seed(seed)
        arguments["logits"].copy_(torch.randn(2, 2049, generator=generator))
        expected = OP.reference(**arguments)
        replay()
        assert torch.equal(kept[-1].tokens, expected.tokens)


@not_interpreted
def test_triton_refuses_a_cpu():
    with pytest.raises(BackendError, match="expected CUDA tensors, got cpu ones"):
        OP.implementations["triton"](**OP.inputs(CASES["odd"]))


@not_interpreted
@pytest.mark.parametrize(
    ("logits", "message"),
    [
        (torch.zeros(2, 3, dtype=torch.float64), "logits: expected dtype float32"),
        (torch.zeros(2, 3, 4), "logits: expected shape"),
        (torch.zeros(2, 8)[:, ::2], "logits: expected a contiguous last dim"),
    ],
)
def test_logits_of_no_token_are_refused(logits, message):
    with pytest.raises(ShapeError, match=message):
        greedy_tokens(logits, backend="reference")


@not_interpreted
def test_an_unknown_backend_is_refused():
    with pytest.raises(BackendError, match="greedy backend: expected one of reference, triton"):
        greedy_tokens(torch.zeros(1, 2), backend="cuda")


@not_interpreted
def test_cost_counts_logits_and_choices():
    assert OP.cost(CASES["odd"]).bytes == 7 * (23 * 4 + 12)
