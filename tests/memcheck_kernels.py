"""Cases of the CUDA kernels beside tree attention, to be run under compute-sanitizer.

    sanitize="compute-sanitizer --report-api-errors no"
    $sanitize --tool memcheck python -m tests.memcheck_kernels
    $sanitize --tool racecheck python -m tests.memcheck_kernels --small

With PYTORCH_NO_CUDA_MEMORY_CACHING=1 each tensor is an allocation of its own. Calls of the driver
that may fail, as cuda-bindings' search for symbols does, are not reported. `--small` runs every second
case and experts of few inputs: racecheck slows a kernel a hundredfold. Cases that a kernel refuses
are counted, and every op must have run some.
"""

import argparse
from collections import Counter
from dataclasses import replace

import torch

from engine.errors import EngineError
from engine.kernels import OPS, GroupedExpertsCase
from engine.kernels.grouped_experts.cases import INT4

RANK = GroupedExpertsCase("rank", "", 9, 16, 8, 7168, 256, INT4)
NARROW = replace(RANK, hidden=512)
FEW = replace(RANK, num_rows=3, num_experts=24, top_k=4)  # for kernels whose blocks wait for others
NAMES = ("grouped_experts", "skinny_linear", "draft_tree", "walk_tree")


def cases_of(name: str, *, is_small: bool) -> tuple:
    cases = OPS[name].cases[:: 2 if is_small else 1]
    if name != "grouped_experts":
        return cases
    served = NARROW if is_small else RANK
    most_rows = 40 if is_small else 300  # tiles of many tokens
    few = replace(FEW, hidden=1024) if is_small else FEW
    return (*cases, served, few, replace(few, num_rows=1), replace(served, num_rows=most_rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="fewer and smaller cases")
    is_small = parser.parse_args().small
    ran, refused = Counter(), Counter()
    for name in NAMES:
        op = OPS[name]
        for case in cases_of(name, is_small=is_small):
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
