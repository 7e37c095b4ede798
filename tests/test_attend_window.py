"""Attention of a block over a window: plain loops over positions against every backend.

As attention_runs.py says, the Triton backend runs in Triton's interpreter, which test_choose_experts
starts for this file as well, and on a CUDA device.
"""

import dataclasses
import math

import pytest
import torch

from engine.context_rows import ContextRows, Sight
from engine.errors import BackendError, ShapeError
from engine.kernels import OPS, attend_window
from engine.window_attention import WindowAttention
from tests.attention_runs import INTERPRETED, captured, not_interpreted
from tests.kimi import KIMI_DRAFTER
from tests.op_runs import every_dtype, every_kernel_run, runs_of

OP = OPS["attend_window"]
CASES = {case.name: case for case in OP.cases}
RUNS = runs_of(OP)
every_run, every_case = RUNS.every_run, RUNS.every_case


def keys_of(case, length, q):
    """Columns of the keys that the row at `q` sees, found position by position."""
    ahead = case.ahead or math.inf
    return [
        p - length if p >= length else case.block_size + p % case.ring
        for p in range(length + case.block_size)
        if q - p < case.behind and p - q < ahead
    ]


def by_hand(case, arguments):
    """What every row sees, mixed one by one, in float64."""
    queries, rows = arguments["queries"].double(), arguments["rows"].double()
    S, D = case.block_size, case.head_dim
    out = queries.new_empty(len(queries), S, case.num_key_heads, case.group, D)
    for n, length in enumerate(case.lengths):
        for s in range(S):
            seen = rows[n, :, keys_of(case, length, length + s)]
            values, keys = seen.chunk(2, dim=-1)
            scores = queries[n, :, s::S] @ keys.transpose(1, 2) / math.sqrt(D)
            out[n, s] = scores.softmax(-1) @ values
    return out.view(len(queries) * S, -1)


def row_errors(got, wanted):
    return (got.cpu().double() - wanted).norm(dim=-1) / wanted.norm(dim=-1)


@every_case
@every_run
@every_dtype
def test_every_backend_gives_what_the_definition_says(case, device, backend, dtype):
    arguments = OP.inputs(case, device=device, dtype=dtype)

    got = OP.implementations[backend](**arguments)

    assert got.dtype == dtype
    wanted = by_hand(case, OP.inputs(case, dtype=dtype))
    assert row_errors(got, wanted).max() <= 2 * OP.tolerance(dtype).output_rel


@every_run
def test_a_number_that_is_none_reaches_those_alone_that_see_it(device, backend):
    case = CASES["turned"]
    arguments = OP.inputs(case, device=device)
    arguments["rows"][2, 0, 1] = torch.nan  # of the block

    got = OP.implementations[backend](**arguments).view(len(case.lengths), -1)

    assert got[2].isnan().all()
    assert got[[0, 1, 3, 4]].isfinite().all()


@every_run
def test_no_sequences_give_no_rows(device, backend):
    arguments = OP.inputs(CASES["turned"], device=device)
    none = {name: arguments[name][:0] for name in ("queries", "rows", "lengths")}

    assert OP.implementations[backend](**arguments | none).shape == (0, 32)


@every_kernel_run
def test_a_graph_replays_other_rows_and_lengths(device):
    case = CASES["turned"]
    arguments = OP.inputs(case, device=device)
    got = {}

    def body():
        got["out"] = OP.implementations["triton"](**arguments)

    replay = captured(body, device)
    for seed, lengths in ((5, (0, 3, 12, 900, 16)), (6, (20, 0, 1, 31, 2**40))):
        other = OP.inputs(dataclasses.replace(case, seed=seed, lengths=lengths), device=device)
        for name in ("queries", "rows", "lengths"):
            arguments[name].copy_(other[name])

        replay()

        torch.testing.assert_close(got["out"], OP.reference(**other), rtol=1e-5, atol=1e-5)


if INTERPRETED:

    def test_triton_refuses_float64():
        with pytest.raises(BackendError, match="bfloat16, float16 or float32 rows, got torch"):
            OP.implementations["triton"](**OP.inputs(CASES["turned"], dtype=torch.float64))

    def test_triton_refuses_wide_heads():
        case = dataclasses.replace(CASES["one-row"], head_dim=129)

        with pytest.raises(BackendError, match="heads of at most 128 dims, got 129"):
            OP.implementations["triton"](**OP.inputs(case))


if not INTERPRETED:

    def test_triton_refuses_a_cpu():
        with pytest.raises(BackendError, match="expected CUDA tensors, got cpu ones"):
            OP.implementations["triton"](**OP.inputs(CASES["turned"]))


@not_interpreted
@pytest.mark.parametrize("length", [0, 5, 130])
def test_layers_of_a_drafter_are_attended_where_their_rows_lie(length):
    config = dataclasses.replace(KIMI_DRAFTER, block_size=5, head_dim=16)
    sight = Sight(12, 1)
    rows = ContextRows.zeros(config, (sight,), 1, torch.empty(0, dtype=torch.float64))
    rows = rows.widened(256)
    draws = torch.Generator().manual_seed(0)
    keys, values = (torch.randn(1, config.num_key_value_heads, length + 5, 16, generator=draws,
                                dtype=torch.float64) for _ in range(2))  # fmt: skip
    new = torch.cat((values, keys), dim=-1)
    rows.block(0).copy_(new[:, :, length:])
    kept = sight.num_kept(rows.capacity)
    for position in range(max(0, length - sight.ring), length):
        rows.layers[0][:, :, rows.front + position % kept] = new[:, :, position]
    queries = torch.randn(1, config.num_key_value_heads, 10, 16, generator=draws).double()
    attend = WindowAttention(12, 1, sight.ring, torch.tensor([length]), kept, "reference")

    got = attend(queries, rows, 0).view(5, config.num_key_value_heads, 2, 16)

    for s in range(5):
        seen = slice(max(0, length + s - 11), length + s + 1)
        scores = queries[0, :, s::5] @ keys[0, :, seen].transpose(1, 2) / 4
        torch.testing.assert_close(got[s], scores.softmax(-1) @ values[0, :, seen])


@not_interpreted
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 3}, "block_size: expected 1..21, a divisor of 10 packed queries, got 3"),
        ({"behind": 0}, "behind, ahead: expected at least 1, got 0 and 12"),
        ({"ahead": 0}, "behind, ahead: expected at least 1, got 12 and 0"),
        ({"ring": 15}, r"ring: expected at least 16, got 15 \(its 16 slots"),
        ({"behind": 99}, "ring: expected at least 98, got 16"),
        ({"lengths": torch.zeros(4, dtype=torch.int64)}, r"lengths: expected shape \[5\]"),
        ({"lengths": torch.zeros(5, dtype=torch.int32)}, "lengths: expected dtype int64"),
        ({"rows": torch.zeros(5, 1, 21, 16)}, r"rows: expected shape \[5, 1, any, 32\]"),
    ],
)
def test_operands_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ShapeError, match=message):
        attend_window(**OP.inputs(CASES["turned"]) | changes, backend="reference")


@not_interpreted
def test_cost_counts_what_is_read_and_written_once():
    cost = OP.cost(CASES["edges"], itemsize=2)

    assert cost.bytes == 2 * 4 * 16 * (2 * 16 + 2 * (8 + 16))
    assert cost.flops == 4 * 4 * 16 * 24 * 16
