"""Where the tests of tree attention run its backends, and how results are compared.

Triton's interpreter has to be chosen before Triton is imported, so a test file that runs kernels
repeats itself in a process of its own with TRITON_INTERPRET=1; there the Triton backends run on
the CPU. On a CUDA device every backend runs compiled (marker gpu).
"""

import os

import pytest
import torch

from engine.errors import BackendError
from engine.kernels import OPS, TreeAttentionCase, dequantize_rows
from engine.kernels.tree_attention.cases import bush, chain, star
from engine.kernels.tree_attention.reference import unpack_bits

OP = OPS["tree_attention"]
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
KERNEL_BACKENDS = [name for name in OP.implementations if name != "reference"]
READS_FP8 = ("reference", "triton_split", "cuda")
TRITON_BACKENDS = [name for name in KERNEL_BACKENDS if name.startswith("triton")]
ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]

if INTERPRETED:
    PLAIN_RUNS = [("cpu", name) for name in TRITON_BACKENDS]
else:
    PLAIN_RUNS = [("cpu", "reference")] + [("cuda", name) for name in OP.implementations]
RUNS = [pytest.param(*run, marks=ON_GPU if run[0] == "cuda" else ()) for run in PLAIN_RUNS]
KERNEL_RUNS = [run for run in RUNS if run.values[1] != "reference"]
SPLIT_DEVICES = ["cpu"] if INTERPRETED else [pytest.param("cuda", marks=ON_GPU)]

every_run = pytest.mark.parametrize(("device", "backend"), RUNS)
every_kernel_run = pytest.mark.parametrize(("device", "backend"), KERNEL_RUNS)
not_interpreted = pytest.mark.skipif(INTERPRETED, reason="nothing of it runs in the interpreter")


def served_case(name, context_lens, trees, num_heads=8, page_size=64, **more):
    """A case at the widths that are served."""
    widths = {"value_dim": 512, "rope_dim": 64}
    return TreeAttentionCase(
        name, "", context_lens, trees, num_heads, page_size=page_size, **widths, **more
    )


def edges(page_size, *, hybrid, **more):
    """Contexts at the edges of pages, tiles and shares, and none; every kind of tree."""
    trees = (bush(9, 1), chain(9), star(9), bush(2, 2))
    name = f"page{page_size}{'-hybrid' if hybrid else ''}"
    lengths = (4095, 4096, 4097, 0)
    return served_case(name, lengths, trees, page_size=page_size, hybrid=hybrid, **more)


def call(backend, arguments, **options):
    """Run a backend; one made for bfloat16 and the production widths alone may refuse others.

    So may one without kernels for fp8 rows.
    """
    is_served = arguments["q"].dtype == torch.bfloat16 and arguments["value_dim"] == 512
    is_fp8 = arguments["kv_pages"].dtype == torch.uint8
    try:
        return OP.implementations[backend](**arguments, **options)
    except BackendError as error:
        if backend not in ("reference", *TRITON_BACKENDS) and not is_served:
            pytest.skip(str(error))
        if backend not in READS_FP8 and is_fp8:
            pytest.skip(str(error))
        raise


def captured(body, device):
    """Return what repeats `body`: a graph's replay, or without a device the call itself."""
    if device == "cpu":
        return body
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        body()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        body()
    return graph.replay


def far_apart(tensor):
    """The same values, the last of the first dim beyond 2**31 elements.

    Nearly all of the storage is never touched, so on a CPU it never takes memory.
    """
    stride = 2**31 // (len(tensor) - 1) // 16 * 16 + 16
    size = (len(tensor) - 1) * stride + tensor[0].numel()
    storage = torch.empty(size, dtype=tensor.dtype, device=tensor.device)
    view = storage.as_strided(tensor.shape, (stride, *tensor.stride()[1:]))
    view.copy_(tensor)
    return view


def in_float64(arguments):
    """The same values in float64, which every backend's result is compared in."""
    return {
        name: value.double() if torch.is_tensor(value) and value.is_floating_point() else value
        for name, value in arguments.items()
    }


def in_numbers(arguments):
    """The same call over the numbers that fp8 rows stand for, in the dtype of the queries."""
    if arguments["kv_pages"].dtype != torch.uint8:
        return arguments
    value_dim, dtype = arguments["value_dim"], arguments["q"].dtype
    rows = {name: arguments[name] for name in ("kv_pages", "tree_kv")}
    return arguments | {
        name: None if one is None else dequantize_rows(one, value_dim, dtype)
        for name, one in rows.items()
    }


def eager(arguments):
    """Attend in PyTorch, every product and the softmax in the dtype of the inputs."""
    arguments = in_numbers(arguments)
    q, pages, scale = arguments["q"], arguments["kv_pages"], arguments["softmax_scale"]
    value_dim = arguments["value_dim"]
    N, T, H, D = q.shape
    out = q.new_zeros(N, T, H, value_dim)
    lse = torch.full((N, T, H), -torch.inf, device=q.device)
    for n in range(N):
        context, size = int(arguments["context_lens"][n]), int(arguments["tree_sizes"][n])
        tree = arguments["tree_kv"]
        in_pages = context + (size if tree is None else 0)
        ids = arguments["page_table"][n, : -(-in_pages // pages.shape[1])].long()
        rows = pages[ids].flatten(0, 1)[:in_pages]
        rows = rows if tree is None else torch.cat([rows, tree[n, :size]])
        visible = torch.ones(size, len(rows), dtype=torch.bool, device=q.device)
        visible[:, context:] = unpack_bits(arguments["ancestor_bits"][n, :size], size)
        scores = (q[n, :size].reshape(-1, D) @ rows.T).view(size, H, -1) * scale
        scores = scores.masked_fill(~visible[:, None], -torch.inf)
        out[n, :size] = (scores.softmax(-1).nan_to_num() @ rows[:, :value_dim]).to(q.dtype)
        lse[n, :size] = scores.logsumexp(-1).float()
    return out, lse


def errors(results, expected):
    """‖out - expected‖ / ‖expected‖, and the largest |lse - expected|."""
    out, lse = (result.double() for result in results)
    want_out, want_lse = expected
    finite = want_lse.isfinite()
    out_error = (out - want_out).norm() / want_out.norm()
    return out_error.item(), (lse - want_lse)[finite].abs().max().item()


def assert_close(actual, expected, tolerance):
    """Compare shape, dtype, where values are infinite, then values."""
    for have, want in zip(actual, expected, strict=True):
        assert have.shape == want.shape
        assert not have.isnan().any()
        assert torch.equal(have.isfinite(), want.isfinite())
    out, lse = (have.double() for have in actual)
    want_out, want_lse = (want.double() for want in expected)
    error, size = (out - want_out).norm(dim=-1), want_out.norm(dim=-1)
    assert (error <= tolerance.output_rel * size).all(), (error / size).nan_to_num().max()
    finite = want_lse.isfinite()
    assert ((lse - want_lse)[finite].abs() <= tolerance.lse_abs).all()


def assert_as_near_as_pytorch(run, arguments, query_scale):
    """Two runs agree to the bit, and err at most twice as much as PyTorch in the inputs' dtype."""
    expected = OP.reference(**in_float64(arguments))

    first, again = run(arguments), run(arguments)

    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert_close(first, expected, OP.tolerance(arguments["q"].dtype, query_scale))
    error, lse_error = errors(first, expected)
    eager_error, eager_lse_error = errors(eager(arguments), expected)
    assert error <= 2 * eager_error
    assert lse_error <= 2 * eager_lse_error
