"""Latent rows in fp8: what a row in bytes is, and tree attention over such rows on the reference.

The cases of the op table that are fp8 run wherever the others do, see test_tree_attention.py.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import BackendError, ShapeError
from engine.kernels import OPS, TreeAttentionCase, dequantize_rows, fp8_row_bytes, quantize_rows
from engine.kernels.tree_attention.cases import bush, chain
from tests.attention_runs import in_float64

OP = OPS["tree_attention"]
SERVED = TreeAttentionCase(
    "served", "", (300, 64), (bush(9, 1), chain(4)), 8, 512, 64, page_size=16, is_fp8=True
)


def e4m3(byte):
    """The number a byte stands for, by the format's definition; NaN for 0x7f and 0xff."""
    sign, exponent, mantissa = -1 if byte & 0x80 else 1, byte >> 3 & 15, byte & 7
    if byte & 0x7F == 0x7F:
        return float("nan")
    if exponent == 0:
        return sign * mantissa * 2.0**-9
    return sign * (8 + mantissa) * 2.0 ** (exponent - 10)


def test_a_row_of_656_bytes_is_values_scales_and_rotated_dims_in_this_order():
    values = np.arange(512, dtype=np.uint8) * 37 % 0x7F
    scales = np.array([0.5, 3.0, 2.0**-20, 1e3], dtype=np.float32)
    rope = np.linspace(-2, 2, 64, dtype=np.float32)
    upper_halves = (rope.view(np.uint32) >> 16).astype(np.uint16)
    row = np.concatenate([values, scales.view(np.uint8), upper_halves.view(np.uint8)])

    got = dequantize_rows(torch.from_numpy(row), 512)

    assert len(row) == fp8_row_bytes(512, 64) == 656
    assert got[:512].tolist() == [
        np.float32(e4m3(value)) * scales[i // 128] for i, value in enumerate(values.tolist())
    ]
    assert (
        got[512:].numpy().view(np.uint32).tolist()
        == (upper_halves.astype(np.uint32) << 16).tolist()
    )


def test_every_byte_is_its_number_and_both_nans_are_nan():
    rows = torch.zeros(256, fp8_row_bytes(1, 0), dtype=torch.uint8)
    rows[:, 0] = torch.arange(256)
    rows[:, 1:] = torch.ones(1).view(torch.uint8)

    got = dequantize_rows(rows, 1)[:, 0]

    want = torch.tensor([e4m3(byte) for byte in range(256)])
    assert torch.equal(got.nan_to_num(7777.0), want.nan_to_num(7777.0))
    assert got.isnan().sum() == 2


def scale_of(group):
    """The scale quantize_rows gives a group of values."""
    row = quantize_rows(group[None], len(group))[0]
    return row[len(group) :].view(torch.float32).item()


@pytest.mark.parametrize(
    ("amax", "scale"),
    [
        pytest.param(448.0, 1.0, id="the-largest-fits"),
        pytest.param(448.0 * (1 + 2**-23), 2.0, id="the-next-does-not"),
        pytest.param(449.0, 2.0, id="above"),
        pytest.param(1.0, 2.0**-8, id="one"),
        pytest.param(0.0, 2.0**-13, id="zeros-have-the-least-scale"),
        pytest.param(1e-30, 2.0**-13, id="tiny-numbers-too"),
        pytest.param(3e38, 2.0**120, id="the-largest-float32"),
    ],
)
def test_a_scale_is_the_least_power_of_two_that_holds_the_largest_magnitude(amax, scale):
    group = torch.zeros(128)
    group[77] = -amax

    assert scale_of(group) == scale


def test_rows_of_zeros_stay_zeros():
    rows = torch.zeros(3, 576, dtype=torch.bfloat16)

    assert torch.equal(dequantize_rows(quantize_rows(rows, 512), 512), torch.zeros(3, 576))


@pytest.mark.parametrize("poison", [torch.nan, torch.inf, -torch.inf])
def test_a_group_that_holds_no_number_is_nan_and_its_neighbours_are_not(poison):
    rows = torch.ones(1, 576)
    rows[0, 130] = poison

    got = dequantize_rows(quantize_rows(rows, 512), 512)[0]

    assert got[128:256].isnan().all()
    assert not got[:128].isnan().any()
    assert not got[256:].isnan().any()


@settings(deadline=None, max_examples=60)
@given(
    seed=st.integers(0, 2**31), value_dim=st.integers(1, 300), rope_dim=st.integers(0, 9),
    power=st.integers(-12, 100),
)  # fmt: skip
def test_a_row_loses_a_sixteenth_of_each_value_at_most_and_its_rotated_dims_nothing(
    seed, value_dim, rope_dim, power
):
    rows = torch.randn(3, value_dim + rope_dim, generator=torch.Generator().manual_seed(seed))
    rows = (rows * 2.0**power).to(torch.bfloat16)
    coded = quantize_rows(rows, value_dim)

    got = dequantize_rows(coded, value_dim, torch.bfloat16)

    assert coded.shape == (3, fp8_row_bytes(value_dim, rope_dim))
    assert torch.equal(got[:, value_dim:], rows[:, value_dim:])
    values, kept = rows[:, :value_dim].double(), got[:, :value_dim].double()
    scales = coded[:, value_dim:].contiguous()[:, : 4 * -(-value_dim // 128)].contiguous()
    scales = scales.view(torch.float32).repeat_interleave(128, dim=1)[:, :value_dim].double()
    # 3 bits of mantissa down to 2^-6 scales, steps of 2^-9 scales below.
    assert ((values - kept).abs() <= torch.maximum(values.abs() / 16, scales * 2.0**-10)).all()
    again = quantize_rows(got, value_dim)
    assert torch.equal(dequantize_rows(again, value_dim, torch.bfloat16), got)
    assert torch.equal(got.double(), dequantize_rows(coded, value_dim, torch.float64))


def test_attention_over_fp8_rows_is_that_over_the_numbers_they_stand_for():
    for case in (SERVED, replace(SERVED, hybrid=True)):
        arguments = OP.inputs(case)
        plain = dict(arguments)
        for name in ("kv_pages", "tree_kv"):
            if arguments[name] is not None:
                plain[name] = dequantize_rows(arguments[name], 512)

        actual, expected = OP.reference(**arguments), OP.reference(**plain)

        assert all(torch.equal(a, b) for a, b in zip(actual, expected, strict=True))


def test_the_error_of_fp8_rows_is_a_few_percent_of_attention_over_bfloat16():
    """A row errs by 2.5 %; where a tree attends to hundreds of them it averages out."""
    case = replace(SERVED, is_fp8=False)
    arguments = OP.inputs(case, dtype=torch.bfloat16)
    expected = OP.reference(**in_float64(arguments))

    coded = arguments | {"kv_pages": quantize_rows(arguments["kv_pages"], 512)}
    out, lse = OP.reference(**in_float64(coded))

    assert ((out - expected[0]).norm() / expected[0].norm()).item() < 0.04
    assert (lse - expected[1])[expected[1].isfinite()].abs().max().item() < 0.05


@pytest.mark.parametrize(
    ("name", "wrong", "message"),
    [
        ("kv_pages", torch.zeros(30, 16, 576, dtype=torch.uint8), "rows of 656 bytes .512 fp8"),
        ("kv_pages", torch.zeros(30, 16, 655, dtype=torch.uint8), "rows of 656 bytes .* got 655"),
        ("kv_pages", torch.zeros(30, 16, 656, dtype=torch.int8), r"shape \[any, any, 576\]"),
        ("kv_pages", torch.zeros(30, 16, 576).to(torch.float8_e4m3fn), "bfloat16 or uint8"),
        ("kv_pages", torch.zeros(480, 656, dtype=torch.uint8), r"shape \[any, any, 656\]"),
        ("kv_pages", torch.zeros(30, 16, 1312, dtype=torch.uint8)[..., ::2], "contiguous last"),
        ("tree_kv", torch.zeros(2, 9, 576, dtype=torch.bfloat16), r"shape \[2, 9, 656\]"),
        ("tree_kv", torch.zeros(2, 9, 656, dtype=torch.bfloat16), "tree_kv: expected dtype uint8"),
    ],
)
def test_rows_of_another_width_or_dtype_are_refused_by_name(name, wrong, message):
    arguments = OP.inputs(SERVED, dtype=torch.bfloat16) | {name: wrong}

    with pytest.raises(ShapeError, match=message):
        OP.reference(**arguments)


def test_plain_pages_with_fp8_trees_are_refused():
    arguments = OP.inputs(replace(SERVED, is_fp8=False, hybrid=True), dtype=torch.bfloat16)
    arguments["tree_kv"] = quantize_rows(arguments["tree_kv"], 512)

    with pytest.raises(ShapeError, match=r"tree_kv: expected shape \[2, 9, 576\]"):
        OP.reference(**arguments)


def test_scales_beside_the_rows_are_refused():
    with pytest.raises(BackendError, match="the scales of fp8 rows lie in the rows"):
        OP.reference(**OP.inputs(SERVED), kv_scales=torch.ones(4))


@pytest.mark.parametrize(
    ("rows", "value_dim", "message"),
    [
        (torch.zeros(2, 655, dtype=torch.uint8), 512, "rows of 528 bytes and 2 for each rotated"),
        (torch.zeros(2, 500, dtype=torch.uint8), 512, "got 500 of torch.uint8"),
        (torch.zeros(2, 656), 512, "got 656 of torch.float32"),
    ],
)
def test_bytes_that_are_no_rows_are_refused(rows, value_dim, message):
    with pytest.raises(ShapeError, match=message):
        dequantize_rows(rows, value_dim)


def test_a_value_wider_than_its_row_is_refused():
    with pytest.raises(ShapeError, match=r"value_dim: expected 1\.\.576"):
        quantize_rows(torch.zeros(2, 576), 577)


@pytest.mark.parametrize(
    ("backend", "arch"), [("cuda", 100), ("cuda_mma", 90), ("triton_serial", 90)]
)
def test_a_backend_without_kernels_for_fp8_rows_lists_none(backend, arch):
    pytest.importorskip("triton")
    arguments = OP.inputs(replace(SERVED, context_lens=(5, 5)), dtype=torch.bfloat16)

    assert OP.kernels(backend, arch, **arguments) == ()


def test_fp8_rows_cost_656_bytes_each():
    plain, coded = (OP.cost(replace(SERVED, is_fp8=is_fp8)) for is_fp8 in (False, True))
    rows = 300 + 64 + 9 + 4

    assert (plain.kv_bytes, coded.kv_bytes) == (rows * 1152, rows * 656)
    assert plain.bytes - plain.kv_bytes == coded.bytes - coded.kv_bytes
    assert plain.flops == coded.flops
