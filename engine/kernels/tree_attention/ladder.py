"""Tree attention with the ways of making it fast as switches, for measuring what each is worth.

The results are those of `tree_attention`; only the time differs. The engine never calls it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from engine.kernels.tree_attention.problem import pose

if TYPE_CHECKING:
    from torch import Tensor


def ladder_attention(
    q: Tensor,
    kv_pages: Tensor,
    page_table: Tensor,
    context_lens: Tensor,
    ancestor_bits: Tensor,
    *,
    tree_sizes: Tensor,
    softmax_scale: float,
    value_dim: int,
    read_once: bool,
    split: bool,
    packed: bool,
    tree_kv: Tensor | None = None,
    num_splits: int | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    workspace: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attend every tree token to its sequence's committed rows and to its ancestors.

    Parameters
    ----------
    q, kv_pages, page_table, context_lens, ancestor_bits : Tensor
    tree_sizes, softmax_scale, value_dim, tree_kv, out, lse
        As of `tree_attention`; on CUDA, rows of two bytes an element.
    read_once : bool
        Take the values from the tile of keys; off, gather each row a second time.
    split : bool
        Divide the rows of a sequence over programs and merge; off, one program walks them all.
    packed : bool
        Let tokens x heads share the rows of a tile; off, each head has programs of its own.
    num_splits : int, optional
        With `split`: parts the rows are divided into; by default a function of batch, heads,
        capacity of the page table and the number of SMs.
    workspace : [≥ splits * N * T * H * (value_dim + 1)] float32, contiguous, optional
        With `split`: scratch (mutated); allocated if absent.

    Returns
    -------
    out, lse
        Rows that see nothing and padding rows are 0 with lse -inf.

    Raises
    ------
    ShapeError
        A tensor's shape, dtype, device or layout is not as above.
    BackendError
        It cannot run here, or was given an argument the switches have no use for.
    """
    from engine.kernels.tree_attention import triton_ladder  # noqa: PLC0415 - imports Triton

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
        kv_scales=None,
        num_splits=num_splits,
        out=out,
        lse=lse,
        workspace=workspace,
    )
    if len(q):
        triton_ladder.run(problem, triton_ladder.Switches(read_once, split, packed))
    return problem.out, problem.lse


def ladder_programs(
    q: Tensor,
    *operands: Tensor,
    read_once: bool,
    split: bool,
    packed: bool,
    **arguments: Any,
) -> int:
    """Count the programs that read the rows, for a call of `ladder_attention`."""
    from engine.kernels.tree_attention import triton_ladder  # noqa: PLC0415 - imports Triton

    absent = ("kv_scales", "num_splits", "tree_kv", "out", "lse", "workspace")
    options: dict[str, Any] = dict.fromkeys(absent)
    problem = pose(q, *operands, **(options | arguments))
    return triton_ladder.programs(problem, triton_ladder.Switches(read_once, split, packed))
