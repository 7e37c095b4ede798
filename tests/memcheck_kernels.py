"""Every case of the CUDA kernels beside tree attention, to be run under compute-sanitizer.

    compute-sanitizer --tool memcheck python -m tests.memcheck_kernels
    compute-sanitizer --tool racecheck python -m tests.memcheck_kernels

With PYTORCH_NO_CUDA_MEMORY_CACHING=1 each tensor is an allocation of its own. Cases that a kernel
refuses are counted, and every op must have run some.
"""

from collections import Counter
from dataclasses import replace

import torch

from engine.errors import EngineError
from engine.kernels import OPS, GroupedExpertsCase
from engine.kernels.grouped_experts.cases import INT4

RANK = GroupedExpertsCase("rank", "", 9, 16, 8, 7168, 256, INT4)
MORE = {"grouped_experts": (RANK, replace(RANK, num_rows=1), replace(RANK, num_rows=300))}
NAMES = ("grouped_experts", "skinny_linear", "draft_tree", "walk_tree")


def main() -> None:
    ran, refused = Counter(), Counter()
    for name in NAMES:
        op = OPS[name]
        for case in (*op.cases, *MORE.get(name, ())):
            try:
                op.implementations["cuda"](**op.inputs(case, device="cuda", dtype=torch.bfloat16))
            except EngineError:
                refused[name] += 1
                continue
            torch.cuda.synchronize()
            ran[name] += 1
    print(f"ran {dict(ran)}, refused {dict(refused)}")  # noqa: T201 - what was checked
    assert all(ran[name] for name in NAMES)


if __name__ == "__main__":
    main()
