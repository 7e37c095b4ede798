"""The kernel behind the read ceiling compiles without a GPU; its result is checked on one."""

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from benchmarks._streaming_read import SPAN, TILE, TILES, _read_kernel, streaming_read


@pytest.mark.parametrize("capability", [90, 100, 120])
def test_the_read_kernel_compiles_for(capability):
    source = ASTSource(
        _read_kernel,
        signature={"data": "*fp32", "sums": "*fp32", "tile": "constexpr", "tiles": "constexpr"},
        constexprs={"tile": TILE, "tiles": TILES},
    )

    compiled = triton.compile(
        source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 8}
    )

    assert "ld.global" in compiled.asm["ptx"]


@pytest.mark.gpu
def test_every_element_is_read_once():
    data = torch.randn(4 * SPAN, device="cuda", dtype=torch.float32)

    sums = streaming_read(data)

    torch.testing.assert_close(sums.double(), data.double().view(4, SPAN).sum(1), rtol=0, atol=1e-2)
