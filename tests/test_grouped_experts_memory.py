"""The memory that the CUDA kernels of grouped experts are told of, read off their launches.

The kernels take addresses. What is tested is that each of them, at the time of every launch, lies in
a tensor that is still there and has room for all that is written from there on.
"""

from itertools import pairwise

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from engine.kernels import OPS, GroupedExpertsCase, experts_workspace_size
from engine.kernels.grouped_experts import cuda_int4_few
from engine.kernels.grouped_experts.cases import INT4
from engine.kernels.grouped_experts.cuda_int4 import FEW, MANY, num_tiles, queue
from engine.kernels.grouped_experts.problem import pose
from tests.attention_runs import not_interpreted

pytestmark = not_interpreted
OP = OPS["grouped_experts"]
OPTIONS = ("gate_scale", "up_scale", "down_scale", "block", "num_splits", "out", "workspace")
CASES = [
    (GroupedExpertsCase("", "", 1, 1, 1, 256, 256, INT4), FEW),
    (GroupedExpertsCase("", "", 9, 5, 3, 512, 256, INT4), FEW),
    (GroupedExpertsCase("", "", 37, 5, 3, 256, 512, INT4), MANY),
]


def spans_written(problem, cut):
    """Bytes from each address on that the four kernels write."""
    (M, hidden), P = problem.x.shape, problem.num_pairs
    return {
        "order": 4 * P,
        "tiles": 4 * 3 * num_tiles(problem, cut),
        "ordered_x": 2 * M * hidden,
        "begins": 4 * M * hidden // 32,
        "h": 2 * P * problem.inner,
        "parts": 4 * P * hidden,
        "out": 2 * M * hidden,
    }


def spans_of_few(problem):
    """The same, of the three kernels for few tokens."""
    (M, hidden), P = problem.x.shape, problem.num_pairs
    tiles = cuda_int4_few.num_tiles(problem)
    return {
        "tiles": 4 * 8 * (1 + tiles),
        "done": 4 * tiles,
        "integers": M * hidden // 256 * 656,
        "h": 4 * P * problem.inner,
        "parts": 4 * P * hidden,
        "out": 2 * M * hidden,
    }


class Allocations(TorchDispatchMode):
    """Remembers, without holding them, the memory of all tensors that are made."""

    def __init__(self):
        super().__init__()
        self.made = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        for one in out if isinstance(out, tuple | list) else (out,):
            if isinstance(one, torch.Tensor):
                self.remember(one)
        return out

    def remember(self, tensor):
        memory = tensor.untyped_storage()
        self.made.append((StorageWeakRef(memory), memory.data_ptr(), memory.nbytes()))

    def room_from(self, address):
        """Bytes from an address to the end of the memory around it, 0 if nobody holds any."""
        held = [(begin, size) for memory, begin, size in self.made if not memory.expired()]
        return max((b + n - address for b, n in held if b <= address < b + n), default=0)


class Witness:
    """Stands where a kernel does and looks at what it would be given."""

    def __init__(self, spans, allocations):
        self.spans, self.allocations, self.num_launches = spans, allocations, 0

    def launch(self, params, launch, stream):
        addresses = {name: getattr(params, name) for name in self.spans}
        for name, size in self.spans.items():
            assert addresses[name] % 16 == 0, name
            assert self.allocations.room_from(addresses[name]) >= size, name
        ordered = sorted(addresses, key=addresses.__getitem__)
        for name, following in pairwise(ordered):
            assert addresses[name] + self.spans[name] <= addresses[following], name
        self.num_launches += 1


@pytest.mark.parametrize(("case", "cut"), CASES, ids=lambda one: getattr(one, "num_rows", None))
@pytest.mark.parametrize("is_callers", [False, True], ids=["own", "caller's"])
def test_all_that_is_written_has_room_in_memory_that_is_held(case, cut, is_callers):
    operands = dict.fromkeys(OPTIONS) | OP.inputs(case, dtype=torch.bfloat16)
    if is_callers:
        size = experts_workspace_size(**operands, backend="cuda")
        operands["workspace"] = torch.empty(size, dtype=torch.float32)
    with Allocations() as allocations:
        problem = pose(**operands)
        if is_callers:
            allocations.remember(problem.workspace)
        witness = Witness(spans_written(problem, cut), allocations)
        queue(problem, cut, [witness] * 4, stream=None)

    assert witness.num_launches == 4


@pytest.mark.parametrize("is_callers", [False, True], ids=["own", "caller's"])
def test_the_kernels_for_few_tokens_have_room_too(is_callers):
    case = GroupedExpertsCase("", "", 9, 16, 3, 1024, 512, INT4)
    operands = dict.fromkeys(OPTIONS) | OP.inputs(case, dtype=torch.bfloat16)
    if is_callers:
        size = experts_workspace_size(**operands, backend="cuda")
        operands["workspace"] = torch.empty(size, dtype=torch.float32)
    with Allocations() as allocations:
        problem = pose(**operands)
        assert cuda_int4_few.serves(problem)
        if is_callers:
            allocations.remember(problem.workspace)
        witness = Witness(spans_of_few(problem), allocations)
        cuda_int4_few.queue(problem, [bytes(128)] * 3, [witness] * 3, stream=None)

    assert witness.num_launches == 3
