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
(float32, bfloat16 and float16; sm_90, sm_100, sm_120, or the CPU under TRITON_INTERPRET=1).

Source: arXiv 2412.19437 §2.1.1 (latent rows), arXiv 2604.12989 (the tree).
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from engine.errors import BackendError
from engine.kernels.op import Op
from engine.kernels.tree_attention.cases import CASES, TreeAttentionCase, cost, inputs, tolerance
from engine.kernels.tree_attention.problem import Problem, pose
from engine.kernels.tree_attention.reference import run as _run_reference

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

__all__ = ["OP", "TreeAttentionCase", "launched_programs", "tree_attention"]


def _run_serial(problem: Problem) -> None:
    from engine.kernels.tree_attention import triton_serial  # noqa: PLC0415 - see _BACKENDS

    triton_serial.run(problem)


def _run_split(problem: Problem) -> None:
    from engine.kernels.tree_attention import triton_split  # noqa: PLC0415 - see _BACKENDS

    triton_split.run(problem)


def _serial_programs(problem: Problem) -> int:
    from engine.kernels.tree_attention import triton_serial  # noqa: PLC0415 - see _BACKENDS

    return triton_serial.programs(problem)


def _split_programs(problem: Problem) -> int:
    from engine.kernels.tree_attention import triton_split  # noqa: PLC0415 - see _BACKENDS

    return triton_split.programs(problem)


# Triton is imported by the first call that asks for it: it takes a good part of a second, and
# where there is no Triton the reference works without it.
_BACKENDS: dict[str, Callable[[Problem], None]] = {
    "reference": _run_reference,
    "triton_serial": _run_serial,
    "triton_split": _run_split,
}
_PROGRAMS: dict[str, Callable[[Problem], int]] = {
    "triton_serial": _serial_programs,
    "triton_split": _split_programs,
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
    kv_pages : [P, L, D], dtype of q, last dim contiguous
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
    tree_kv : [N, T, D], dtype of q, last dim contiguous, optional
        The tree's rows. Without it they follow the committed rows in the pages.
    kv_scales : None
        Reserved for quantised pages, which no backend reads yet.
    num_splits : int, optional
        Parts the rows are divided into, for backends that split; by default a function of
        batch, heads, capacity of the page table and the number of SMs.
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
        Rows that see nothing and padding rows are 0 with lse -inf.

    Raises
    ------
    ShapeError
        A tensor's shape, dtype, device or layout is not as above.
    BackendError
        The backend is unknown, cannot run here, or was given an argument it has no use for.
    """
    run = _BACKENDS.get(backend)
    if run is None:
        raise BackendError(
            f"attention backend: expected one of {', '.join(_BACKENDS)}, got {backend!r}"
        )
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


def launched_programs(q: Tensor, *operands: Tensor, backend: str, **arguments: Any) -> int:
    """Count the programs of the kernel that reads the rows, for a call with these arguments.

    Against the number of SMs it says whether a launch can fill the device at all. The reference
    has no such kernel, which is a BackendError.
    """
    count = _PROGRAMS.get(backend)
    if count is None:
        raise BackendError(
            f"launched programs: expected one of {', '.join(_PROGRAMS)}, got {backend!r}"
        )
    options: dict[str, Any] = dict.fromkeys(
        ("kv_scales", "num_splits", "tree_kv", "out", "lse", "workspace")
    )
    return count(pose(q, *operands, **(options | arguments)))


OP: Op[TreeAttentionCase] = Op(
    name="tree_attention",
    reference=partial(tree_attention, backend="reference"),
    implementations={name: partial(tree_attention, backend=name) for name in _BACKENDS},
    cases=CASES,
    inputs=inputs,
    cost=cost,
    tolerance=tolerance,
)
