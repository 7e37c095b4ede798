import pytest
import torch

from engine.errors import BackendError
from engine.kernels import OPS, cubin
from engine.kernels.tree_attention import cuda_launch
from engine.kernels.tree_attention.cases import TreeAttentionCase, chain
from engine.kernels.tree_attention.problem import pose

OPTIONS = ("kv_scales", "num_splits", "out", "lse", "workspace")


@pytest.fixture
def sources(tmp_path, monkeypatch):
    """A folder of sources with one kernel, and an empty cache."""
    monkeypatch.setattr(cubin, "SOURCES", tmp_path)
    monkeypatch.setenv(cubin.CACHE_VARIABLE, str(tmp_path / "cache"))
    text = 'extern "C" __global__ void fill(int* x) { x[threadIdx.x] = VALUE; }\n'
    (tmp_path / "fill.cu").write_text(text, encoding="utf-8")
    return tmp_path


def cached(sources):
    return sorted((sources / "cache").iterdir())


def problem(
    tokens, num_heads, *, num_seqs=1, page_size=64, hybrid=False, dtype=torch.bfloat16, **sizes
):
    widths = {"value_dim": 512, "rope_dim": 64} | sizes
    lengths, trees = (5,) * num_seqs, (chain(tokens),) * num_seqs
    case = TreeAttentionCase(
        "case", "", lengths, trees, num_heads, page_size=page_size, hybrid=hybrid, **widths
    )
    return pose(**OPS["tree_attention"].inputs(case, dtype=dtype), **dict.fromkeys(OPTIONS))


def test_a_cubin_is_compiled_once_for_a_source_its_macros_and_an_architecture(sources):
    first = cubin.compile_cubin("fill.cu", arch="sm_90a", macros={"VALUE": 1})
    (kept,) = cached(sources)
    written = kept.stat().st_mtime_ns

    again = cubin.compile_cubin("fill.cu", arch="sm_90a", macros={"VALUE": 1})
    cubin.compile_cubin("fill.cu", arch="sm_90a", macros={"VALUE": 2})
    cubin.compile_cubin("fill.cu", arch="sm_120", macros={"VALUE": 1})

    assert first == again
    assert first.startswith(b"\x7fELF")
    assert kept.stat().st_mtime_ns == written
    assert len(cached(sources)) == 3


def test_a_changed_source_is_compiled_again(sources):
    first = cubin.compile_cubin("fill.cu", arch="sm_90a", macros={"VALUE": 1})
    path = sources / "fill.cu"
    path.write_text(path.read_text(encoding="utf-8").replace("fill", "refill"), encoding="utf-8")

    assert cubin.compile_cubin("fill.cu", arch="sm_90a", macros={"VALUE": 1}) != first


def test_a_changed_header_is_compiled_again(sources):
    header, source = sources / "value.cuh", sources / "fill.cu"
    header.write_text("#define VALUE 1\n", encoding="utf-8")
    source.write_text(
        f'#include "value.cuh"\n{source.read_text(encoding="utf-8")}', encoding="utf-8"
    )
    first = cubin.compile_cubin("fill.cu", arch="sm_90a", macros={})
    header.write_text("#define VALUE 2\n", encoding="utf-8")

    assert cubin.compile_cubin("fill.cu", arch="sm_90a", macros={}) != first


def test_a_source_that_does_not_compile_is_an_error_with_the_compilers_words(sources):
    with pytest.raises(BackendError, match=r'(?s)fill.cu: expected it to comp.*"VALUE" is undef'):
        cubin.compile_cubin("fill.cu", arch="sm_90a", macros={})

    assert not (sources / "cache").exists()


@pytest.mark.parametrize(
    ("tokens", "num_heads", "rows"),
    [
        pytest.param(1, 8, 8, id="fewest"),
        pytest.param(9, 8, 72, id="one-block"),
        pytest.param(10, 8, 40, id="two-equal-blocks"),
        pytest.param(1, 12, 16, id="rounded-up-to-eight"),
        pytest.param(1, 128, 64, id="two-blocks-of-64"),
        pytest.param(27, 8, 72, id="most"),
    ],
)
def test_few_packed_rows_are_cut_into_the_fewest_blocks_of_equal_size(tokens, num_heads, rows):
    cut = cuda_launch.cut_of("cuda", problem(tokens, num_heads), 90)

    assert (cut.source, cut.rows) == ("tree_attention_sm90.cu", rows)


@pytest.mark.parametrize(
    ("backend", "tokens", "num_seqs", "launches"),
    [
        pytest.param("cuda", 9, 8, ["tree_attention"], id="most-rows-merged-inside"),
        pytest.param("cuda", 9, 9, ["tree_attention", "merge"], id="more-rows"),
        pytest.param("cuda", 132, 1, ["tree_attention"], id="wide-merged-inside"),
        pytest.param("cuda", 133, 1, ["tree_attention", "merge"], id="wide"),
        pytest.param("cuda_mma", 9, 7, ["tree_attention"], id="mma"),
        pytest.param("cuda_mma", 9, 8, ["tree_attention", "merge"], id="mma-more-rows"),
    ],
)
def test_few_rows_of_all_sequences_are_merged_in_the_launch_that_reads(
    backend, tokens, num_seqs, launches
):
    served = cuda_launch.kernels(backend, problem(tokens, 8, num_seqs=num_seqs), 90)

    assert [kernel.name for kernel in served] == launches


@pytest.mark.parametrize(("tokens", "num_heads"), [(28, 8), (65, 8), (9, 64), (129, 128)])
def test_many_packed_rows_go_to_the_wide_kernel(tokens, num_heads):
    cut = cuda_launch.cut_of("cuda", problem(tokens, num_heads), 90)

    assert (cut.source, cut.rows) == ("tree_attention_sm90_wide.cu", 64)


@pytest.mark.parametrize(
    ("tokens", "num_heads", "rows"), [(1, 8, 8), (5, 8, 40), (9, 8, 40), (1, 128, 32), (65, 8, 40)]
)
def test_every_device_runs_one_kernel_which_is_the_default_beside_hopper(tokens, num_heads, rows):
    posed = problem(tokens, num_heads)
    cuts = {cuda_launch.cut_of("cuda_mma", posed, arch) for arch in (90, 100, 120)}
    cuts |= {cuda_launch.cut_of("cuda", posed, arch) for arch in (100, 120)}

    (cut,) = cuts
    assert (cut.source, cut.rows) == ("tree_attention_mma.cu", rows)
    assert [cut.arch_name(arch) for arch in (90, 120)] == ["sm_90", "sm_120"]


@pytest.mark.parametrize(("tokens", "rows"), [(1, 8), (5, 40), (9, 72), (65, 72)])
def test_fp8_rows_go_to_one_kernel_on_hopper_and_to_none_elsewhere(tokens, rows):
    posed = problem(tokens, 8, is_fp8=True)

    cut = cuda_launch.cut_of("cuda", posed, 90)

    assert (cut.source, cut.rows) == ("tree_attention_sm90_fp8.cu", rows)
    assert cuda_launch.kernels("cuda", posed, 90)[0].name == "tree_attention_fp8"
    assert cuda_launch.kernels("cuda", posed, 120) == ()
    assert cuda_launch.kernels("cuda_mma", posed, 90) == ()


@pytest.mark.parametrize(
    ("tokens", "backend", "is_fp8"),
    [
        pytest.param(1, "cuda", False, id="narrow"),
        pytest.param(65, "cuda", False, id="wide"),
        pytest.param(1, "cuda_mma", False, id="mma"),
        pytest.param(5, "cuda", True, id="fp8"),
    ],
)
def test_a_source_refuses_another_amount_of_shared_memory_than_it_lays_out(tokens, backend, is_fp8):
    posed = problem(tokens, 8, is_fp8=is_fp8)
    cut = cuda_launch.cut_of(backend, posed, 90)
    macros, arch = cuda_launch.macros(posed, cut), cut.arch_name(90)
    asked = {**macros, "SHARED_BYTES": macros["SHARED_BYTES"] - 8}

    cubin.compile_cubin(cut.source, arch=arch, macros=macros)
    with pytest.raises(BackendError, match="shared memory the launch asks for"):
        cubin.compile_cubin(cut.source, arch=arch, macros=asked)


def test_rows_the_kernel_does_not_take_have_no_kernels():
    served = cuda_launch.kernels("cuda", problem(9, 8), 90)

    assert [kernel.name for kernel in served] == ["tree_attention"]
    assert cuda_launch.kernels("cuda", problem(9, 8, dtype=torch.float32), 90) == ()
    assert cuda_launch.kernels("cuda", problem(9, 8, value_dim=64), 90) == ()


def test_tensors_of_the_cpu_are_refused():
    operands = OPS["tree_attention"].inputs(
        TreeAttentionCase("case", "", (5,), (chain(2),), 8, value_dim=512, rope_dim=64),
        dtype=torch.bfloat16,
    )

    with pytest.raises(BackendError, match=r"backend cuda: expected a GPU .* got cpu"):
        OPS["tree_attention"].implementations["cuda"](**operands)


def test_the_parameters_are_laid_out_as_the_source_declares_them():
    source = (cubin.SOURCES / "tree_attention_line.cuh").read_text(encoding="utf-8")
    body = source.split("struct Params {")[1].split("};")[0]
    lines = [line.split("//")[0].strip() for line in body.splitlines()]
    statements = " ".join(line for line in lines if line).split(";")
    names = [
        name.strip().split()[-1].lstrip("*")
        for statement in statements
        for name in statement.split(",")
        if name.strip()
    ]

    assert names == [name for name, _ in cuda_launch.Params._fields_]
