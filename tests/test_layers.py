import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.config import YarnConfig
from engine.layers import (
    Rotary,
    SwiGlu,
    joined,
    rms_norm,
    rope_frequencies,
    rotate_half_split,
    rotate_interleaved,
    yarn_correction_range,
)

KIMI_YARN = YarnConfig(factor=64, original_max_position_embeddings=4096)
THINKING_YARN = YarnConfig(factor=64, original_max_position_embeddings=4096, beta_fast=1.0)
DEEPSEEK_YARN = YarnConfig(factor=40, original_max_position_embeddings=4096)


@pytest.mark.parametrize(
    ("dim", "theta", "yarn", "expected_range", "golden"),
    [
        (
            64,
            50000.0,
            KIMI_YARN,
            (8, 20),
            {
                0: 1.0,
                1: 7.1311108491e-1,
                8: 6.6874030498e-2,
                9: 4.3776655951e-2,
                14: 4.4658487486e-3,
                19: 1.5837499103e-4,
                20: 1.8070233868e-5,
                31: 4.3822064558e-7,
            },
        ),
        (64, 50000.0, THINKING_YARN, (19, 20), {19: 1.6217599081e-3, 20: 1.8070233868e-5}),
        (
            64,
            10000.0,
            DEEPSEEK_YARN,
            (10, 23),
            {
                10: 5.6234132519e-2,
                11: 3.9006926567e-2,
                16: 5.5e-3,
                22: 1.7782794100e-4,
                23: 3.3338035804e-5,
            },
        ),
        (
            128,
            50000.0,
            KIMI_YARN,
            (17, 39),
            {
                0: 1.0,
                1: 8.4445904869e-1,
                17: 5.6472380176e-2,
                18: 4.5554817992e-2,
                28: 4.4658487486e-3,
                38: 9.7904539908e-5,
                39: 2.1398591081e-5,
                63: 3.7005938948e-7,
            },
        ),
    ],
    ids=["kimi-target", "kimi-thinking-target", "deepseek-v3-target", "kimi-drafter"],
)
def test_yarn_frequencies_are_the_published_ones(dim, theta, yarn, expected_range, golden):
    frequencies = rope_frequencies(dim, theta, yarn)

    assert yarn_correction_range(dim, theta, yarn) == expected_range
    assert frequencies.shape == (dim // 2,)
    for index, value in golden.items():
        assert frequencies[index].item() == pytest.approx(value, rel=2e-10)


def test_a_yarn_ramp_of_no_width_is_still_a_ramp():
    yarn = YarnConfig(factor=2, original_max_position_embeddings=5, beta_fast=1.0)
    assert (
        0 == yarn_correction_range(8, 10000.0, yarn)[0] < yarn_correction_range(8, 10000.0, yarn)[1]
    )

    frequencies = rope_frequencies(8, 10000.0, yarn)

    assert torch.isfinite(frequencies).all()


def test_without_yarn_the_frequencies_are_powers_of_theta():
    frequencies = rope_frequencies(8, 10000.0, None)

    assert frequencies.tolist() == pytest.approx([1.0, 1e-1, 1e-2, 1e-3], rel=1e-12)


@pytest.mark.parametrize("rotate", [rotate_interleaved, rotate_half_split])
@settings(deadline=None)  # a busy machine is no mistake
@given(shift=st.integers(0, 200_000), gap=st.integers(0, 1000))
def test_rotated_products_depend_on_the_distance_alone(rotate, shift, gap):
    generator = torch.Generator().manual_seed(gap)
    q, k = torch.randn(2, 1, 8, generator=generator, dtype=torch.float64)
    rotary = Rotary(rope_frequencies(8, 50000.0, KIMI_YARN), amplitude=1.0)

    def score(q_position, k_position):
        at = rotary.at(torch.tensor([q_position, k_position]), torch.float64)
        turned = rotate(torch.stack((q, k)).view(2, 1, 8), at)
        return (turned[0] * turned[1]).sum().item()

    assert score(gap + shift, shift) == pytest.approx(score(gap, 0), abs=1e-9)


def test_the_two_layouts_rotate_different_pairs():
    x = torch.tensor([[1.0, 2.0, 3.0, 4.0]], dtype=torch.float64)
    at = Rotary(torch.tensor([math.pi / 2, 0.0], dtype=torch.float64), amplitude=1.0).at(
        torch.tensor([1]), torch.float64
    )

    assert rotate_interleaved(x, at).tolist()[0] == pytest.approx([-2.0, 1.0, 3.0, 4.0])
    assert rotate_half_split(x, at).tolist()[0] == pytest.approx([-3.0, 2.0, 1.0, 4.0])


def test_the_amplitude_scales_what_is_rotated():
    x = torch.ones(1, 4, dtype=torch.float64)
    frequencies = rope_frequencies(4, 100.0, None)
    plain, loud = (
        rotate_half_split(x, Rotary(frequencies, amplitude).at(torch.tensor([5]), x.dtype))
        for amplitude in (1.0, 1.4158883083359672)
    )

    torch.testing.assert_close(loud, plain * 1.4158883083359672)


def test_far_positions_keep_their_phase_in_float32():
    rotary = Rotary(rope_frequencies(64, 50000.0, KIMI_YARN), amplitude=1.0)
    positions = torch.tensor([262_143])

    single = rotary.at(positions, torch.float32)
    double = rotary.at(positions, torch.float64)

    torch.testing.assert_close(single.cos.double(), double.cos, rtol=0, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_rms_norm_is_its_formula_with_a_wide_accumulator(dtype):
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(5, 48, generator=generator, dtype=torch.float64) * 3).to(dtype)
    weight = torch.randn(48, generator=generator, dtype=torch.float64).to(dtype)

    got = rms_norm(x, weight, 1e-5)

    wide = x.double()
    expected = wide * (wide.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * weight.double()
    tolerance = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 1.6e-2}[dtype]
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), expected, rtol=tolerance, atol=tolerance)


def test_swiglu_gates_before_it_projects_down():
    generator = torch.Generator().manual_seed(1)
    gate, up, down, x = (
        torch.randn(shape, generator=generator, dtype=torch.float64)
        for shape in ((6, 4), (6, 4), (4, 6), (3, 4))
    )

    got = SwiGlu(gate, up, down)(x)

    gated = x @ gate.T
    expected = (gated / (1 + (-gated).exp()) * (x @ up.T)) @ down.T
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_matrices_behind_each_other_are_one_without_a_copy():
    whole = torch.arange(40.0).view(10, 4)

    assert joined(*whole.split([3, 5, 2])).data_ptr() == whole.data_ptr()
    assert torch.equal(joined(*whole.split([3, 5, 2])), whole)
    assert torch.equal(joined(whole[2:5], whole[5:9]), whole[2:9])


@pytest.mark.parametrize(
    "parts",
    [
        (torch.zeros(3, 4), torch.zeros(3, 4)),
        torch.zeros(10, 4).split([3, 7])[::-1],
        torch.zeros(4, 6).split(3, dim=1),
        (torch.zeros(10, 4)[:3], torch.zeros(10, 4).double()[3:]),
        (torch.zeros(6, 4)[:3], torch.zeros(6, 4)[4:]),
    ],
    ids=["apart", "turned-round", "beside", "other-dtype", "gap"],
)
def test_other_matrices_are_not_joined(parts):
    assert joined(*parts) is None


def test_a_gated_mlp_is_the_same_with_its_projections_behind_each_other():
    generator = torch.Generator().manual_seed(1)
    whole = torch.randn(12, 4, generator=generator, dtype=torch.float64)
    down = torch.randn(4, 6, generator=generator, dtype=torch.float64)
    x = torch.randn(3, 4, generator=generator, dtype=torch.float64)

    apart = SwiGlu(whole[:6].clone(), whole[6:].clone(), down)(x)

    torch.testing.assert_close(SwiGlu(*whole.split(6), down)(x), apart, rtol=1e-12, atol=1e-12)
