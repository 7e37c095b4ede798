"""The ladder's switches: the same results whichever are on, in Triton's interpreter or on a GPU.

As for the backends of the op, one test of the ordinary run repeats this file in the interpreter.
"""

import itertools
import os
from dataclasses import replace

import pytest
import torch

from engine.errors import BackendError, ShapeError
from engine.kernels import OPS, TreeAttentionCase, ladder_attention, ladder_programs
from engine.kernels.tree_attention.cases import bush
from engine.kernels.tree_attention.problem import pose
from tests.interpreter import assert_passes_in_the_interpreter

pytest.importorskip("triton")  # comes with the package on Linux

OP = OPS["tree_attention"]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CASES = {case.name: case for case in OP.cases}
SWITCHES = [
    dict(zip(("read_once", "split", "packed"), values, strict=True))
    for values in itertools.product((False, True), repeat=3)
]
ALL_ON = SWITCHES[-1]
KIB = 1024
SHARED_LIMIT = {90: 227 * KIB, 120: 99 * KIB}  # opt-in shared memory of a block
# NaN in all that is unused and impossible page ids are in every case; here also views, both
# layouts, edges of tiles and pages, trees over a mask word, masks that are no tree.
ADVERSARIAL = (
    "root-only",
    "empty-context",
    "edge64-page16",
    "hybrid-edge64-page64",
    "any-mask",
    "strided",
    "production",
)
no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
on_gpu = pytest.param("cuda", torch.bfloat16, marks=[pytest.mark.gpu, no_gpu])
RUNS = [("cpu", torch.float32)] if INTERPRETED else [on_gpu]
every_run = pytest.mark.parametrize(("device", "dtype"), RUNS)
compiled = pytest.mark.skipif(INTERPRETED, reason="nothing of it runs in the interpreter")


def name_of(switches):
    return "+".join(name for name, is_on in switches.items() if is_on) or "none"


every_switch = pytest.mark.parametrize("switches", SWITCHES, ids=name_of)
both_ends = pytest.mark.parametrize("switches", [SWITCHES[0], ALL_ON], ids=name_of)


def wide(arguments):
    return {
        name: value.double() if torch.is_tensor(value) and value.is_floating_point() else value
        for name, value in arguments.items()
    }


def assert_close(actual, expected, tolerance):
    for have, want in zip(actual, expected, strict=True):
        assert have.shape == want.shape
        assert not have.isnan().any()
        assert torch.equal(have.isfinite(), want.isfinite())
    (out, lse), (want_out, want_lse) = (
        [one.double() for one in pair] for pair in (actual, expected)
    )
    error, size = (out - want_out).norm(dim=-1), want_out.norm(dim=-1)
    assert (error <= tolerance.output_rel * size).all(), (error / size).nan_to_num().max()
    finite = want_lse.isfinite()
    assert ((lse - want_lse)[finite].abs() <= tolerance.lse_abs).all()


@every_run
@every_switch
@pytest.mark.parametrize("name", ADVERSARIAL)
def test_every_combination_agrees_with_the_reference(device, dtype, switches, name):
    arguments = OP.inputs(CASES[name], device=device, dtype=dtype)

    actual = ladder_attention(**arguments, **switches)

    assert actual[0].dtype == dtype
    assert_close(actual, OP.reference(**wide(arguments)), OP.tolerance(dtype))


@every_run
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("num_splits", [1, 20])
def test_the_number_of_splits_does_not_change_the_result(device, dtype, packed, num_splits):
    arguments = OP.inputs(CASES["long"], device=device, dtype=dtype)
    workspace = torch.full((20 * arguments["q"].numel(),), torch.nan, device=device)

    actual = ladder_attention(
        **arguments,
        **ALL_ON | {"packed": packed},
        num_splits=num_splits,
        workspace=workspace,
    )

    assert_close(actual, OP.reference(**wide(arguments)), OP.tolerance(dtype))


@every_run
@both_ends
def test_a_combination_repeats_itself_to_the_bit(device, dtype, switches):
    arguments = OP.inputs(CASES["hybrid"], device=device, dtype=dtype)

    first, again = (ladder_attention(**arguments, **switches) for _ in range(2))

    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


@every_run
@both_ends
def test_the_caller_may_own_the_outputs(device, dtype, switches):
    case = CASES["strided"]
    arguments = OP.inputs(case, device=device, dtype=dtype)
    expected = ladder_attention(**arguments, **switches)
    larger = torch.full((*expected[0].shape[:3], 48), torch.nan, device=device, dtype=dtype)
    wide_lse = torch.full((*expected[1].shape, 2), torch.nan, device=device)
    out, lse = larger[..., : case.value_dim], wide_lse[..., 0]

    returned = ladder_attention(**arguments, **switches, out=out, lse=lse)

    assert returned[0] is out
    assert torch.equal(out, expected[0])
    assert torch.equal(lse, expected[1])
    assert larger[..., case.value_dim :].isnan().all()
    assert wide_lse[..., 1].isnan().all()


if INTERPRETED:

    def test_what_a_switch_has_no_use_for_is_refused():
        arguments = OP.inputs(CASES["root-only"])
        walk = ALL_ON | {"split": False}

        with pytest.raises(BackendError, match="a ladder without split does not split"):
            ladder_attention(**arguments, **walk, num_splits=2)
        with pytest.raises(ShapeError, match=r"workspace: expected at least 102 .* got 101"):
            ladder_attention(**arguments, **ALL_ON, num_splits=3, workspace=torch.empty(101))

    def test_an_empty_batch_gives_empty_results():
        arguments = OP.inputs(CASES["uneven"])
        per_sequence = ("q", "page_table", "context_lens", "ancestor_bits", "tree_sizes")

        out, _ = ladder_attention(
            **arguments | {key: arguments[key][:0] for key in per_sequence}, **ALL_ON
        )

        assert len(out) == 0


@compiled
def test_tensors_of_the_cpu_are_refused():
    with pytest.raises(BackendError, match="ladder: expected CUDA tensors, got cpu"):
        ladder_attention(**OP.inputs(CASES["root-only"]), **ALL_ON)


@pytest.mark.parametrize(
    ("switches", "programs"),
    # one a head; ⌈9 * 8 / 16⌉ blocks of packed rows; each times the splits
    [
        ({"split": False, "packed": False}, 8),
        ({"split": False, "packed": True}, 5),
        ({"split": True, "packed": False}, 8 * 33),
        ({"split": True, "packed": True}, 5 * 33),
    ],
)
def test_programs_of_the_incidents_shape_are_counted(switches, programs):
    case = TreeAttentionCase("", "", context_lens=(300,), trees=(bush(9, 0),), num_heads=8)
    arguments = OP.inputs(case) | {"num_splits": 33 if switches["split"] else None}

    assert ladder_programs(**arguments, read_once=True, **switches) == programs


if not INTERPRETED:
    from engine.kernels.tree_attention import triton_ladder
    from engine.kernels.triton_build import triton_kernel

    @pytest.mark.parametrize(
        ("arch", "page_size", "read_once", "packed"),
        # sm_90: all shapes of tiles; sm_120, with less shared memory: the larger ones
        [(90, 64, once, packed) for once in (False, True) for packed in (False, True)]
        + [(90, 1, True, True), (120, 64, False, True), (120, 64, True, True)],
    )
    def test_its_kernels_fit_the_machine_at_the_width_of_production(
        arch, page_size, read_once, packed
    ):
        case = replace(CASES["production"], page_size=page_size)
        arguments = OP.inputs(case, dtype=torch.bfloat16)
        options = dict.fromkeys(("kv_scales", "num_splits", "out", "lse", "workspace"))
        switches = triton_ladder.Switches(read_once, split=True, packed=packed)

        for launch in triton_ladder.launches(pose(**arguments, **options), switches, arch):
            kernel = triton_kernel(launch.kernel, launch.arguments, launch.meta, arch)
            assert kernel.compile().shared_bytes <= SHARED_LIMIT[arch]

    def test_the_ladder_passes_this_file_in_the_interpreter():
        assert_passes_in_the_interpreter(__file__)
