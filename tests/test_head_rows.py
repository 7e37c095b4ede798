"""What a drafter layer makes of a block before it attends: plain loops against every backend.

As attention_runs.py says, the Triton backend runs in Triton's interpreter, which test_choose_experts
starts for this file as well, and on a CUDA device.
"""

import math

import pytest
import torch

from engine.errors import BackendError, ShapeError
from engine.kernels import OPS, head_rows
from tests.attention_runs import INTERPRETED, captured, not_interpreted
from tests.op_runs import every_dtype, every_kernel_run, runs_of

OP = OPS["head_rows"]
CASES = {case.name: case for case in OP.cases}
RUNS = runs_of(OP)
every_run, every_case = RUNS.every_run, RUNS.every_case


def turned(head, norm, cos, sin, eps):
    """One head, normalised, its pairs (i, i + D / 2) turned by their angles."""
    half = len(cos)
    scale = 1 / math.sqrt(sum(x * x for x in head) / len(head) + eps)
    normed = [x * scale * w for x, w in zip(head, norm, strict=True)]
    pairs = list(zip(normed[:half], normed[half:], cos, sin, strict=True))
    return [a * c - b * s for a, b, c, s in pairs] + [b * c + a * s for a, b, c, s in pairs]


def by_hand(case, arguments):
    """Rows of the block and queries in plain Python, in float64."""
    eps = arguments["eps"]
    held = {name: one.double().tolist() for name, one in arguments.items() if name != "eps"}
    N, S, heads, group = case.num_seqs, case.block_size, case.num_key_heads, case.group
    block = torch.empty(N, heads, S, 2 * case.head_dim, dtype=torch.float64)
    out = torch.empty(N, heads, group * S, case.head_dim, dtype=torch.float64)
    for n, k, s in ((n, k, s) for n in range(N) for k in range(heads) for s in range(S)):
        m = n * S + s
        angles = held["cos"][m], held["sin"][m], eps
        key = turned(held["keys"][m][k], held["key_norm"], *angles)
        block[n, k, s] = torch.tensor(held["values"][m][k] + key, dtype=torch.float64)
        for g in range(group):
            query = turned(held["queries"][m][k * group + g], held["query_norm"], *angles)
            out[n, k, g * S + s] = torch.tensor(query, dtype=torch.float64)
    return block, out


@every_case
@every_run
@every_dtype
def test_every_backend_gives_what_the_definition_says(case, device, backend, dtype):
    arguments = OP.inputs(case, device=device, dtype=dtype)
    block, queries = by_hand(case, OP.inputs(case, dtype=dtype))

    out = OP.implementations[backend](**arguments)

    assert torch.equal(
        arguments["block"][..., : case.head_dim].cpu().double(), block[..., : case.head_dim]
    )
    for got, wanted in ((arguments["block"], block), (out, queries)):
        assert got.shape == wanted.shape
        error = (got.cpu().double() - wanted).norm(dim=-1) / wanted.norm(dim=-1)
        assert error.max() <= 2 * OP.tolerance(dtype).output_rel


@every_run
def test_nothing_else_is_written(device, backend):
    case = CASES["odd"]
    arguments = OP.inputs(case, device=device)
    before = {name: one.clone() for name, one in arguments.items() if name not in ("eps", "block")}

    OP.implementations[backend](**arguments)

    assert all(torch.equal(arguments[name], kept) for name, kept in before.items())
    assert (arguments["block"]._base[:, :, : case.spare] == 7.0).all()


@every_run
def test_no_sequences_give_no_queries(device, backend):
    arguments = OP.inputs(CASES["nano"], device=device)
    per_row = ("queries", "keys", "values", "cos", "sin", "block")
    none = {name: arguments[name][:0] for name in per_row}

    assert OP.implementations[backend](**arguments | none).shape == (0, 1, 16, 8)


@every_kernel_run
def test_a_graph_replays_other_rows(device):
    arguments = OP.inputs(CASES["odd"], device=device)
    got = {}

    def body():
        got["out"] = OP.implementations["triton"](**arguments)

    replay = captured(body, device)
    for seed in (5, 6):
        made = arguments["queries"]._base
        made.copy_(torch.randn(made.shape, generator=torch.Generator().manual_seed(seed)))
        expected = arguments | {"block": arguments["block"].clone()}
        out = OP.reference(**expected)

        replay()

        torch.testing.assert_close(got["out"], out, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(arguments["block"], expected["block"], rtol=1e-5, atol=1e-5)


if INTERPRETED:

    def test_triton_refuses_float64():
        with pytest.raises(BackendError, match="bfloat16, float16 or float32 rows, got torch"):
            OP.implementations["triton"](**OP.inputs(CASES["odd"], dtype=torch.float64))


if not INTERPRETED:

    def test_triton_refuses_a_cpu():
        with pytest.raises(BackendError, match="expected CUDA tensors, got cpu ones"):
            OP.implementations["triton"](**OP.inputs(CASES["odd"]))


@not_interpreted
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"queries": torch.ones(16, 2, 7)}, "queries: expected an even number of dims, got 7"),
        ({"block": torch.ones(2, 1, 7, 16)}, r"block: expected 16 rows .*, got 2 \* 7 rows"),
        ({"queries": torch.ones(16, 3, 8), "block": torch.ones(2, 2, 8, 16)}, "divisor of 3 heads"),
        ({"keys": torch.ones(16, 2, 8)}, r"keys: expected shape \[16, 1, 8\], got"),
        ({"values": torch.ones(16, 1, 8).double()}, "values: expected dtype float32, got"),
        ({"key_norm": torch.ones(7)}, r"key_norm: expected shape \[8\], got \[7\]"),
        ({"cos": torch.ones(16, 8)}, r"cos: expected shape \[16, 4\], got"),
    ],
)
def test_operands_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ShapeError, match=message):
        head_rows(**OP.inputs(CASES["nano"]) | changes, backend="reference")


@not_interpreted
def test_cost_counts_what_is_read_and_written_once():
    numbers = 2 * 15 * 5 * 3 * 6 + 2 * 6

    assert OP.cost(CASES["odd"], itemsize=2).bytes == 2 * numbers + 15 * 6 * 4
