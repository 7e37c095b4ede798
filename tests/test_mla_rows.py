"""What MLA makes before it attends: the reference against plain loops, the kernel against the reference.

As attention_runs.py says, the Triton backend runs in Triton's interpreter, which test_choose_experts
starts for this file as well, and on a CUDA device.
"""

import math

import pytest
import torch

from engine.errors import BackendError, ShapeError
from engine.kernels import OPS, mla_rows
from tests.attention_runs import INTERPRETED, captured, not_interpreted
from tests.op_runs import every_dtype, every_kernel_run, runs_of

OP = OPS["mla_rows"]
CASES = {case.name: case for case in OP.cases}
RUNS = runs_of(OP)
every_run, every_case = RUNS.every_run, RUNS.every_case


def turned(pairs, cos, sin):
    """One row of pairs (2i, 2i + 1) turned by their angles."""
    out = []
    for i in range(len(cos)):
        even, odd = pairs[2 * i], pairs[2 * i + 1]
        out += [even * cos[i] - odd * sin[i], odd * cos[i] + even * sin[i]]
    return out


def by_hand(arguments):
    """Rows and queries in plain Python, in float64; 7 where nothing is written."""
    values = {name: one.double().tolist() for name, one in arguments.items() if name != "eps"}
    rows, out = values["rows"], values["out"]
    C, R = len(values["norm_weight"]), 2 * len(values["cos"][0])
    for m, slot in enumerate(arguments["slots"].tolist()):
        latent, cos, sin = values["kv_a"][m], values["cos"][m], values["sin"][m]
        scale = 1 / math.sqrt(sum(x * x for x in latent[:C]) / C + arguments["eps"])
        normed = [x * scale * w for x, w in zip(latent[:C], values["norm_weight"], strict=True)]
        rows[slot] = normed + turned(latent[C:], cos, sin)
        for h, query in enumerate(values["queries"][m]):
            keys = values["up_keys"][h]
            absorbed = [sum(q * key[c] for q, key in zip(query, keys, strict=False))
                        for c in range(C)]  # fmt: skip
            out[m][h] = absorbed + turned(query[-R:], cos, sin)
    return torch.tensor(rows), torch.tensor(out)


@every_case
@every_run
@every_dtype
def test_every_backend_writes_what_the_definition_says(case, device, backend, dtype):
    arguments = OP.inputs(case, device=device, dtype=dtype)
    expected = by_hand(OP.inputs(case, dtype=dtype))

    OP.implementations[backend](**arguments)

    for name, wanted in zip(("rows", "out"), expected, strict=True):
        written = arguments[name].cpu().double()
        error = (written - wanted).norm(dim=-1) / wanted.norm(dim=-1)
        assert error.max() <= 2 * OP.tolerance(dtype).output_rel, name


@every_run
def test_nothing_else_is_written(device, backend):
    case = CASES["strided"]
    arguments = OP.inputs(case, device=device)
    before = {name: one.clone() for name, one in arguments.items() if name != "eps"}
    wide = {name: arguments[name]._base for name in ("rows", "out")}

    OP.implementations[backend](**arguments)

    for name in before.keys() - {"rows", "out"}:
        assert torch.equal(arguments[name].nan_to_num(), before[name].nan_to_num()), name
    untouched = sorted(set(range(case.num_slots)) - set(arguments["slots"].tolist()))
    assert (arguments["rows"][untouched] == 7.0).all()
    assert all(one[..., -case.gap :].isnan().all() for one in wide.values())


@every_run
def test_no_rows_write_nothing(device, backend):
    arguments = OP.inputs(CASES["pair"], device=device)
    none = {name: arguments[name][:0] for name in ("kv_a", "queries", "cos", "sin", "slots", "out")}

    OP.implementations[backend](**arguments | none)

    assert (arguments["rows"] == 7.0).all()


@every_kernel_run
def test_a_graph_replays_other_rows_at_other_slots(device):
    arguments = OP.inputs(CASES["pair"], device=device)
    replay = captured(lambda: OP.implementations["triton"](**arguments), device)
    for seed in (5, 6):
        generator = torch.Generator().manual_seed(seed)
        arguments["kv_a"].copy_(torch.randn(17, 80, generator=generator))
        arguments["slots"].copy_(torch.randperm(64, generator=generator)[:17])
        arguments["rows"].fill_(7.0)
        expected = {**arguments, "rows": arguments["rows"].clone(),
                    "out": arguments["out"].clone()}  # fmt: skip
        OP.reference(**expected)

        replay()

        torch.testing.assert_close(arguments["rows"], expected["rows"], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(arguments["out"], expected["out"], rtol=1e-4, atol=1e-5)


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
        ({"norm_weight": torch.ones(24)}, "norm_weight: expected an even number of dims less than"),
        ({"norm_weight": torch.ones(17)}, "an even number of dims less than the 24 of a row, got"),
        ({"queries": torch.zeros(1, 1, 1)}, "queries: expected at least 2 dims, got 1"),
        ({"up_keys": torch.zeros(1, 8, 17)}, r"up_keys: expected shape \[1, 8, 16\], got"),
        ({"cos": torch.zeros(1, 2)}, r"cos: expected shape \[1, 1\], got \[1, 2\]"),
        ({"sin": torch.zeros(1, 1).double()}, "sin: expected dtype float32, got"),
        ({"slots": torch.zeros(1, dtype=torch.int32)}, "slots: expected dtype int64"),
        ({"rows": torch.zeros(1, 17)}, r"rows: expected shape \[any, 18\], got"),
        ({"out": torch.zeros(1, 2, 18)}, r"out: expected shape \[1, 1, 18\], got"),
    ],
)
def test_operands_that_do_not_fit_are_refused(changes, message):
    arguments = OP.inputs(CASES["one-row"])
    if "norm_weight" in changes:
        arguments["kv_a"] = torch.zeros(1, 24)

    with pytest.raises(ShapeError, match=message):
        mla_rows(**arguments | changes, backend="reference")


@not_interpreted
def test_cost_counts_what_is_read_and_written_once():
    case = CASES["odd"]

    rows, heads, keys = 2 * 5 * 25 + 19, 5 * 3 * (8 + 6 + 25), 3 * 8 * 19
    assert OP.cost(case, itemsize=2).bytes == 2 * (rows + heads + keys) + 5 * 6 * 4 + 5 * 8
    assert OP.cost(case, itemsize=2).flops == 2 * 5 * keys
