"""What a layer keeps of new context rows: plain loops against every backend.

As attention_runs.py says, the Triton backend runs in Triton's interpreter, which test_choose_experts
starts for this file as well, and on a CUDA device.
"""

import pytest
import torch

from engine.errors import BackendError, ShapeError
from engine.kernels import OPS, keep_rows
from tests.attention_runs import INTERPRETED, captured, not_interpreted
from tests.op_runs import every_dtype, every_kernel_run, runs_of
from tests.test_head_rows import turned

OP = OPS["keep_rows"]
CASES = {case.name: case for case in OP.cases}
RUNS = runs_of(OP)
every_run, every_case = RUNS.every_run, RUNS.every_case


def by_hand(case, arguments):
    """All rows in plain Python, in float64."""
    held = {name: one.double().tolist() for name, one in arguments.items() if name != "eps"}
    rows = arguments["rows"].double()
    for m in range(case.num_rows):
        for k in range(case.num_key_heads):
            angles = held["cos"][m], held["sin"][m], arguments["eps"]
            key = turned(held["keys"][m][k], held["key_norm"], *angles)
            place = arguments["places"][m * case.num_key_heads + k]
            rows[place] = torch.tensor(held["values"][m][k] + key, dtype=torch.float64)
    return rows


@every_case
@every_run
@every_dtype
def test_every_backend_stores_what_the_definition_says_and_nothing_else(
    case, device, backend, dtype
):
    arguments = OP.inputs(case, device=device, dtype=dtype)
    wanted = by_hand(case, OP.inputs(case, dtype=dtype))

    OP.implementations[backend](**arguments)

    got, D = arguments["rows"].cpu().double(), case.head_dim
    assert torch.equal(got[:, :D], wanted[:, :D])
    error = (got - wanted).norm(dim=-1) / wanted.norm(dim=-1)
    assert error.max() <= 2 * OP.tolerance(dtype).output_rel
    beside = torch.ones(case.num_places, dtype=torch.bool)
    beside[arguments["places"].cpu()] = False
    assert (got[beside] == 7.0).all()
    if case.gap:
        assert (arguments["rows"]._base[:, 2 * D :] == 7.0).all()


@every_run
def test_no_rows_store_nothing(device, backend):
    arguments = OP.inputs(CASES["odd"], device=device)
    none = {name: arguments[name][:0] for name in ("keys", "values", "cos", "sin", "places")}

    OP.implementations[backend](**arguments | none)

    assert (arguments["rows"] == 7.0).all()


@every_kernel_run
def test_a_graph_replays_other_rows_to_other_places(device):
    arguments = OP.inputs(CASES["odd"], device=device)
    replay = captured(lambda: OP.implementations["triton"](**arguments), device)
    for seed in (5, 6):
        draws = torch.Generator().manual_seed(seed)
        arguments["keys"].copy_(torch.randn(5, 3, 6, generator=draws))
        arguments["places"].copy_(torch.randperm(40, generator=draws)[:15])
        expected = arguments | {"rows": arguments["rows"].clone()}
        OP.reference(**expected)

        replay()

        torch.testing.assert_close(arguments["rows"], expected["rows"], rtol=1e-5, atol=1e-5)


if not INTERPRETED:

    def test_triton_refuses_a_cpu():
        with pytest.raises(BackendError, match="expected CUDA tensors, got cpu ones"):
            OP.implementations["triton"](**OP.inputs(CASES["odd"]))


@not_interpreted
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"keys": torch.ones(5, 3, 7)}, "keys: expected an even number of dims, got 7"),
        ({"values": torch.ones(5, 2, 6)}, r"values: expected shape \[5, 3, 6\], got"),
        ({"key_norm": torch.ones(6).double()}, "key_norm: expected dtype float32, got"),
        ({"cos": torch.ones(5, 6)}, r"cos: expected shape \[5, 3\], got"),
        ({"rows": torch.ones(40, 6)}, r"rows: expected shape \[any, 12\], got"),
        ({"places": torch.ones(5, dtype=torch.int64)}, r"places: expected shape \[15\], got"),
    ],
)
def test_operands_that_do_not_fit_are_refused(changes, message):
    with pytest.raises(ShapeError, match=message):
        keep_rows(**OP.inputs(CASES["odd"]) | changes, backend="reference")


@not_interpreted
def test_cost_counts_what_is_read_and_written_once():
    assert OP.cost(CASES["odd"], itemsize=2).bytes == 2 * (4 * 15 * 6 + 6) + 5 * 6 * 4 + 8 * 15
