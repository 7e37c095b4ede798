"""Small calls of every backend of tree attention, to be run under compute-sanitizer.

    compute-sanitizer --tool memcheck python -m tests.memcheck_attention
    compute-sanitizer --tool racecheck python -m tests.memcheck_attention cuda_mma

Backends that are named run alone. Every tensor is as large as it must be and no larger; with
PYTORCH_NO_CUDA_MEMORY_CACHING=1 each is an allocation of its own. With the argument `planted` a
page id is no page: an error to find.
"""

import itertools
import sys

import torch

from engine.kernels import OPS, TreeAttentionCase, workspace_size
from engine.kernels.tree_attention.cases import bush, chain, star

OP = OPS["tree_attention"]
READS_FP8 = ("triton_split", "cuda")
KERNEL_BACKENDS = [name for name in OP.implementations if name != "reference"]


def calls(*, hybrid):
    """Contexts at and off the edges of tiles; trees over a mask word, one block and several.

    In the third call few rows have several parts, which `cuda` merges in the launch that reads.
    Then the same over fp8 rows, and fewer of them.
    """
    plain = [(1, star(33)), (64, star(33)), (1, star(5))]
    for (page_size, last), is_fp8 in itertools.product(plain, (False, True)):
        yield TreeAttentionCase(
            f"page{page_size}", "", (65, 0, 64), (bush(9, 1), chain(3), last), 8, 512, 64,
            page_size, hybrid, is_fp8=is_fp8,
        )  # fmt: skip
    # One sequence; scores near 0 and far from it.
    for query_scale, is_fp8 in itertools.product((1.0, 3e3), (False, True)):
        yield TreeAttentionCase(
            "one", "", (321,), (bush(9, 1),), 8, 512, 64, 1, hybrid, is_fp8=is_fp8,
            query_scale=query_scale,
        )  # fmt: skip
    few = (star(2), (-1,), chain(3))
    yield TreeAttentionCase("few", "", (65, 0, 200), few, 8, 512, 64, 1, hybrid, is_fp8=True)


def exact(arguments):
    """The same call with a page table as wide as the longest sequence and pages to the last used."""
    table = arguments["page_table"][:, :-2].contiguous()
    used = table[(table >= 0) & (table < len(arguments["kv_pages"]))]
    pages = arguments["kv_pages"][: int(used.max()) + 1].clone()
    return arguments | {"page_table": table, "kv_pages": pages}


def main(backends, *, is_planted):
    for case in (each for hybrid in (False, True) for each in calls(hybrid=hybrid)):
        arguments = exact(OP.inputs(case, device="cuda", dtype=torch.bfloat16))
        if is_planted:
            arguments["page_table"][0, 0] = 2**20
        for backend in backends:
            if case.is_fp8 and backend not in READS_FP8:
                continue
            options = {}
            if backend != "triton_serial":
                floats = workspace_size(**arguments, backend=backend)
                options["workspace"] = torch.empty(floats, device="cuda")
            OP.implementations[backend](**arguments, **options)
            torch.cuda.synchronize()


if __name__ == "__main__":
    named = [name for name in KERNEL_BACKENDS if name in sys.argv[1:]]
    main(named or KERNEL_BACKENDS, is_planted="planted" in sys.argv[1:])
