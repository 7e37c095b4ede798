"""Attention of draft-tree tokens over a paged latent cache and over their own ancestors.

For sequence n, tree token t and head h, with R the committed rows [0, context_lens[n]) followed
by the tree's rows::

    score[j] = softmax_scale * q[n, t, h] · R[j]          over all D = value_dim + rope_dim
    visible  = every committed row, and tree row j iff bit j of ancestor_bits[n, t] is set
    lse      = ln Σ_visible exp(score)
    out      = Σ_visible exp(score - lse) * R[:, :value_dim]

This is MLA in absorbed form: one latent row is key and value of all heads. A kernel of our own
because no library takes an ancestor mask over pages of one row, and because the cache is what
the step's time is made of: (context_lens + tree_sizes) * D * itemsize bytes have to be read, once.
Bound by that read up to the knee of the machine, by arithmetic beyond it.

Backends: `reference` (PyTorch, any dtype, any device), `triton_serial` and `triton_split`
(float32, bfloat16 and float16; the architectures in `OP.archs`, or the CPU under
TRITON_INTERPRET=1), `cuda` (CUDA C++: bfloat16, value_dim 512, rope_dim 64, rows that begin at
multiples of 16 bytes, a softmax_scale above 0; needs the extra `cuda`) with the kernel made for the
device, `cuda_mma` with the one that every device runs, in 99 KB of shared memory.

Cached rows are numbers of the queries' dtype, or fp8 with scales in bytes (`fp8_rows`), 656 of
them where bfloat16 takes 1152; the tree's rows then are such rows too, in the pages or beside them,
since a node has to be to its descendants what it will be once it is committed. `reference`,
`triton_split` and, on sm_90, `cuda` read them, the others refuse. `cuda` multiplies their values as
float16: one beyond 65504, of a row or of a query, is infinite to it, and NaN where it meets a zero,
a hidden row's weight of zero too; scales below 2^-15 lose bits; where scores are more than 9.7 from
0, a weight 2^31 times smaller than the row's greatest adds nothing to `out`, though to `lse`.

A CUDA graph: a call can be captured, once one like it was made outside, which compiles and loads
the kernels, and replayed with other lengths, pages and masks in the same buffers. What a graph
fixes is the bucket it stands for: N, T and the width of the page table. The number of splits is a
function of these and of the machine (`default_num_splits`), not of the lengths, so that a graph
whose table is as wide as the longest context of its bucket serves every step of the bucket;
`workspace_size` says what to allocate for it. `cuda` and `cuda_mma` have no such number: their
blocks cut the work themselves, by the lengths they find.

A chunk of a prompt is a tree that is one chain, so prefill is the same call: T is not bounded by
the trees that are drafted, only the words of the mask grow with it.

Source: arXiv 2412.19437 §2.1.1 (latent rows), arXiv 2604.12989 (the tree).
"""

from __future__ import annotations

from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any

from engine.kernels.op import Backend, Build, Op
from engine.kernels.registry import backend_named, given, later, op_of
from engine.kernels.tree_attention import cases
from engine.kernels.tree_attention.cases import TreeAttentionCase
from engine.kernels.tree_attention.problem import Problem, pose
from engine.kernels.tree_attention.reference import run as _run_reference

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

__all__ = [
    "CUDA_BACKENDS",
    "OP",
    "TreeAttentionCase",
    "default_num_splits",
    "launched_programs",
    "tree_attention",
    "workspace_size",
]

CUDA_BACKENDS = ("cuda", "cuda_mma")  # in CUDA C++, which needs the extra `cuda`
_WHAT = "attention backend"  # as refusals call it
_ARCHS = (90, 100, 120)


def _built(kernels: str) -> Build:
    return Build(_ARCHS, later("tree_attention.builds", kernels))


def _cuda(name: str) -> Backend:
    def part(function: str) -> Callable[..., Any]:
        return partial(later("tree_attention.cuda_launch", function), name)

    return Backend(
        run=part("run"),
        build=Build(_ARCHS, part("kernels")),
        programs=part("programs"),
        workspace_size=part("workspace_size"),
    )


def _split_workspace(problem: Problem) -> int:
    split = import_module("engine.kernels.tree_attention.triton_split")
    return int(
        split.workspace_size(problem, problem.num_splits or split.choose_num_splits(problem))
    )


_BACKENDS: dict[str, Backend] = {
    "reference": Backend(run=_run_reference),
    "triton_serial": Backend(
        run=later("tree_attention.triton_serial", "run"),
        build=_built("serial"),
        programs=later("tree_attention.triton_serial", "programs"),
    ),
    "triton_split": Backend(
        run=later("tree_attention.triton_split", "run"),
        build=_built("split"),
        programs=later("tree_attention.triton_split", "programs"),
        num_splits=later("tree_attention.triton_split", "choose_num_splits"),
        workspace_size=_split_workspace,
    ),
    **{name: _cuda(name) for name in CUDA_BACKENDS},
}


def tree_attention(
    q: Tensor,
    kv_pages: Tensor,
    page_table: Tensor,
    context_lens: Tensor,
    ancestor_bits: Tensor,
    *,
    tree_sizes: Tensor,
    softmax_scale: float,
    value_dim: int,
    tree_kv: Tensor | None = None,
    kv_scales: Tensor | None = None,
    num_splits: int | None = None,
    backend: str,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    workspace: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend every tree token to its sequence's committed rows and to its ancestors.

    Nothing is cast, copied or read back to the host (the reference, which loops over sequences,
    reads the lengths), so that a call can be captured in a CUDA graph.

    Parameters
    ----------
    q : [N, T, H, D], last dim contiguous
        Absorbed queries; rows of tokens ≥ tree_sizes[n] are padding and never matter.
    kv_pages : [P, L, D], dtype of q, or [P, L, fp8_row_bytes] uint8; last dim contiguous
        All pages of one layer. Rows outside the sequences may hold anything, NaN too.
    page_table : [N, max_pages] int32, last dim contiguous
        Page ids in order of position; entries beyond a sequence's length are never read.
    context_lens : [N] int32 or int64, contiguous
        Committed rows, the tree's excluded.
    ancestor_bits : [N, T, W] int32, last dim contiguous, 32 W ≥ T
        Bit j % 32 of word j // 32 says whether a token sees tree token j (itself included).
    tree_sizes : [N] int32 or int64, contiguous
        Tree tokens of each sequence, the root included; 1..T.
    softmax_scale : float
        Factor of the scores.
    value_dim : int
        Leading dims of a row that are its value.
    tree_kv : [N, T, D], dtype and width of kv_pages, last dim contiguous, optional
        The tree's rows. Without it they follow the committed rows in the pages.
    kv_scales : None
        Refused: the scales of fp8 rows lie in the rows.
    num_splits : int, optional
        Parts the rows are divided into, for backends that split; by default what
        `default_num_splits` gives.
    backend : str
        Name in `OPS["tree_attention"].implementations`.
    out : [N, T, H, value_dim], dtype of q, last dim contiguous, optional
        Written (mutated) and returned; allocated if absent.
    lse : [N, T, H], float32 (float64 for float64 inputs), optional
        Written (mutated) and returned; allocated if absent.
    workspace : [≥ workspace_size] float32, contiguous, optional
        Scratch of the split backends (mutated); allocated if absent.

    Returns
    -------
    out, lse
        Rows that see nothing and padding rows are 0 with lse -inf; those that see NaN are NaN.

    Raises
    ------
    ShapeError
        A tensor's shape, dtype, device or layout is not as above.
    BackendError
        The backend is unknown, cannot run here, or was given an argument it has no use for.
    """
    run = backend_named(_BACKENDS, backend, _WHAT).run
    problem = pose(
        q,
        kv_pages,
        page_table,
        context_lens,
        ancestor_bits,
        tree_sizes=tree_sizes,
        softmax_scale=softmax_scale,
        value_dim=value_dim,
        tree_kv=tree_kv,
        kv_scales=kv_scales,
        num_splits=num_splits,
        out=out,
        lse=lse,
        workspace=workspace,
    )
    if len(q):
        run(problem)
    return problem.out, problem.lse


def launched_programs(*operands: Tensor, backend: str, **arguments: Any) -> int:
    """Count the programs of the kernel that reads the rows, for a call with these arguments.

    Against the number of SMs it says whether a launch can fill the device at all. The reference
    has no such kernel, which is a BackendError.
    """
    count = given(backend, "launched programs", backend_named(_BACKENDS, backend, _WHAT).programs)
    return int(count(_problem(*operands, **arguments)))


def default_num_splits(*operands: Tensor, backend: str, **arguments: Any) -> int:
    """Return the number of splits a call with these arguments takes if it names none.

    The same for all calls of equal N, T, H, dtype, layout and width of the page table on one
    device. A backend that does not split is a BackendError.
    """
    choose = given(backend, "number of splits", backend_named(_BACKENDS, backend, _WHAT).num_splits)
    return int(choose(_problem(*operands, **arguments)))


def workspace_size(*operands: Tensor, backend: str, **arguments: Any) -> int:
    """Return the float32 numbers a call with these arguments needs as its workspace.

    A backend that takes none is a BackendError.
    """
    size = given(backend, "workspace", backend_named(_BACKENDS, backend, _WHAT).workspace_size)
    return int(size(_problem(*operands, **arguments)))


# The arguments of a call, checked; the optional ones may be left out.
_problem = partial(
    pose, kv_scales=None, num_splits=None, tree_kv=None, out=None, lse=None, workspace=None
)

OP: Op[TreeAttentionCase] = op_of(
    tree_attention, _BACKENDS, _problem, cases, beside={"ladder": _built("ladder")}
)
