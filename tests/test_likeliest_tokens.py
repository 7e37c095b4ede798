"""The likeliest tokens: the reference against a sort in plain Python, the kernels against it.

As attention_runs.py says, the Triton backend runs in Triton's interpreter, which test_choose_experts
starts for this file as well, and on a CUDA device.
"""

import math
import struct

import pytest
import torch

from engine.errors import BackendError, ShapeError
from engine.kernels import OPS, LikeliestTokensCase, likeliest_tokens
from engine.kernels.operands import NO_TOKEN
from tests.attention_runs import INTERPRETED, ON_GPU, captured, not_interpreted
from tests.op_runs import every_kernel_run, runs_of

OP = OPS["likeliest_tokens"]
CASES = {case.name: case for case in OP.cases}
RUNS = runs_of(OP)
every_run, every_case = RUNS.every_run, RUNS.every_case


def by_hand(logits, width):
    """Ids and log-probs of every row in plain Python, sums in float64."""
    ids, log_probs = [], []
    for row in logits.flatten(0, 1).double().tolist():
        best = sorted(range(len(row)), key=lambda token: (-row[token], token))[:width]
        most = max(row[best[0]], -1e300)
        total = math.fsum(math.exp(value - most) for value in row)
        total = most + math.log(total) if total else 0.0
        ids.append(best)
        log_probs.append([row[token] - total for token in best])
    return torch.tensor(ids), torch.tensor(log_probs, dtype=torch.float64)


def assert_near(log_probs, expected, logits):
    """Equal but for the rounding of sums, and for that of the logits themselves."""
    banned = expected.isinf()
    assert torch.equal(log_probs.isinf(), banned)
    size = logits.masked_fill(logits.isinf(), 0.0).abs().amax(-1, keepdim=True).clamp(min=1.0)
    error = (log_probs.double() - expected).masked_fill(banned, 0.0).abs()
    assert (error <= OP.tolerance(torch.float32).output_rel * size).all()


@every_case
@every_run
def test_every_backend_finds_what_the_definition_says(case, device, backend):
    arguments = OP.inputs(case, device=device)
    logits = arguments["draft_logits"].cpu()
    ids, log_probs = by_hand(logits, case.width)

    found = OP.implementations[backend](**arguments)

    shape = (case.num_seqs, case.horizon, min(case.width, case.vocab_size))
    assert found.token_ids.shape == found.log_probs.shape == shape
    assert torch.equal(found.token_ids.flatten(0, 1).cpu(), ids)
    assert_near(found.log_probs.flatten(0, 1).cpu(), log_probs, logits.flatten(0, 1))


@pytest.mark.parametrize("case", OP.production, ids=lambda case: case.name)
@pytest.mark.parametrize("device", [pytest.param("cuda", marks=ON_GPU)])
def test_the_shapes_that_are_served_have_the_ids_of_the_reference(case, device):
    for step in (0.0, 0.0625):  # of bfloat16's last bits
        served = LikeliestTokensCase(
            *("served", "", case.num_seqs, case.vocab_size, case.width, case.horizon, step)
        )
        arguments = OP.inputs(served, device=device)
        expected = OP.reference(**arguments)

        found = OP.implementations["triton"](**arguments)

        assert torch.equal(found.token_ids, expected.token_ids)
        assert_near(found.log_probs, expected.log_probs.double(), arguments["draft_logits"])


@every_run
def test_zeros_of_both_signs_are_equals(device, backend):
    logits = torch.zeros(1, 1, 1030, device=device)
    logits[..., ::2] = -0.0
    logits[..., 7] = 1.0

    found = likeliest_tokens(logits, width=5, backend=backend)

    assert found.token_ids.tolist() == [[[7, 0, 1, 2, 3]]]


@every_run
def test_denormal_logits_are_told_apart(device, backend):
    least = struct.unpack("f", struct.pack("I", 1))[0]
    logits = torch.full((1, 1, 1030), -1.0, device=device)
    logits[0, 0, [5, 1029, 3, 1028]] = torch.tensor([least, 2 * least, -least, 0.0], device=device)

    found = likeliest_tokens(logits, width=4, backend=backend)

    assert found.token_ids.tolist() == [[[1029, 5, 1028, 3]]]


@every_run
@pytest.mark.parametrize(
    ("value", "token"), [(torch.nan, 0), (-torch.nan, 1023), (torch.nan, 1499), (torch.inf, 1024)]
)
def test_what_is_no_distribution_leaves_no_candidate_anywhere(device, backend, value, token):
    arguments = OP.inputs(LikeliestTokensCase("", "", 2, 1500, 8), device=device)
    arguments["draft_logits"][1, 0, token] = value

    found = OP.implementations[backend](**arguments)

    assert found.token_ids.shape == (2, 2, 8)
    assert set(found.token_ids.flatten().tolist()) == {NO_TOKEN}


@every_run
def test_rows_are_found_alike_in_any_company(device, backend):
    arguments = OP.inputs(CASES["part-and-one"], device=device)
    together = OP.implementations[backend](**arguments)

    one = arguments["draft_logits"][1:, :1]
    alone = OP.implementations[backend](**arguments | {"draft_logits": one})

    assert torch.equal(alone.token_ids[0, 0], together.token_ids[1, 0])
    if backend == "triton":
        assert torch.equal(alone.log_probs[0, 0], together.log_probs[1, 0])


@every_run
def test_no_depths_have_no_candidates(device, backend):
    logits = torch.zeros(2, 0, 10, device=device)

    assert likeliest_tokens(logits, width=4, backend=backend).token_ids.shape == (2, 0, 4)


@every_kernel_run
def test_a_graph_replays_other_logits(device):
    arguments = OP.inputs(CASES["part-and-one"], device=device)
    kept = []
    replay = captured(lambda: kept.append(OP.implementations["triton"](**arguments)), device)
    for seed in (3, 4):
        generator = torch.Generator().manual_seed(seed)
        arguments["draft_logits"].copy_(torch.randn(2, 2, 1025, generator=generator))
        expected = OP.reference(**arguments)
        replay()
        assert torch.equal(kept[-1].token_ids, expected.token_ids)


if INTERPRETED:

    def test_triton_refuses_what_it_cannot_run():
        logits = torch.zeros(1, 1, 1200)

        with pytest.raises(BackendError, match="expected a width of at most 512, got 513"):
            likeliest_tokens(logits, width=513, backend="triton")
        with pytest.raises(BackendError, match="expected a contiguous last dim of draft_logits"):
            likeliest_tokens(logits[..., ::2], width=5, backend="triton")


@not_interpreted
def test_triton_refuses_a_cpu():
    with pytest.raises(BackendError, match="expected CUDA tensors, got cpu ones"):
        OP.implementations["triton"](**OP.inputs(CASES["all"]))


@not_interpreted
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"draft_logits": torch.zeros(3, 9)}, r"draft_logits: expected \[N, horizon, V\] float32"),
        ({"draft_logits": torch.zeros(1, 3, 9).double()}, "nothing is cast, rounding decides ties"),
        ({"width": 0}, "width: expected at least 1, got 0"),
    ],
)
def test_logits_that_have_no_candidates_are_refused(changes, message):
    arguments = {"draft_logits": torch.zeros(1, 3, 9), "width": 4}

    with pytest.raises(ShapeError, match=message):
        likeliest_tokens(**arguments | changes, backend="reference")


@not_interpreted
def test_an_unknown_backend_is_refused():
    with pytest.raises(BackendError, match="candidates backend: expected one of reference, triton"):
        likeliest_tokens(torch.zeros(1, 1, 2), width=1, backend="cuda")


@not_interpreted
def test_cost_counts_logits_and_choices():
    assert OP.cost(CASES["all"]).bytes == 2 * 2 * (5 * 4 + 5 * 12)
