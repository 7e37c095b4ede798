"""One layer's mixture of experts, over the tokens of a pass: router, routed and shared experts.

On CUDA it is the layer of one rank of Kimi K2.6 under TP8, its 384 experts in 4 bits, and the body
the replay of a graph in bfloat16, timed between two events without the launch gap; on a CPU the
layer of the trained pair in float32, timed by the wall. Tokens are random and a rank's router is
balanced, so that all experts are chosen equally often and independently: 9 tokens hit 66 of 384.
`bytes` counts those that a pass does hit. Before every sample the caches are flushed: cold.
"""

from dataclasses import replace
from functools import partial
from typing import Any, ClassVar, Final

import torch
from torch import Tensor

from benchmarks._device import DEVICE
from benchmarks._identity import SuiteError
from benchmarks._regimes import PROFILE, moe_axes
from benchmarks._suite import CaseFacts, Clock, _Suite
from benchmarks._timing import CacheFlush, CudaQueue, captured, settled_clock
from engine import TargetConfig, preset
from engine.kernels import Cost, experts_programs
from engine.moe import Moe
from engine.presets import KIMI_EXPERTS, RANKS
from engine.quantized import Weight
from engine.random_weights import random_packed_target

AXES = moe_axes(PROFILE, DEVICE)
RANK: Final = RANKS["kimi-k2.6-tp8-rank"].target
DTYPE: Final = torch.bfloat16 if DEVICE == "cuda" else torch.float32


class MoeLayer(_Suite):
    """Send `num_tokens` random rows through one layer's experts."""

    version = "2"  # in 1 a rank's router preferred some experts: 9 tokens hit 50
    window_validity = ("warm_window",) if DEVICE == "cuda" else ()
    params: ClassVar[tuple[list[int], list[str]]] = (AXES.num_tokens, AXES.moe_backends)
    param_names: ClassVar[list[str]] = ["num_tokens", "moe_backend"]

    def build(self, num_tokens: int, moe_backend: str) -> None:
        self.moe = rank_layer(RANK, DEVICE) if DEVICE == "cuda" else pair_layer()
        self.backend = moe_backend
        self.x = random_rows(num_tokens, self.moe)
        self.flush = CacheFlush.of(DEVICE)
        call = partial(self.moe, self.x, backend=moe_backend)
        self.body = captured(call) if DEVICE == "cuda" else call

    def reset(self) -> None:
        self.flush()

    def reset_in_window(self) -> None:
        """Flush nothing: a flush moves more bytes than the shorter bodies, and would be counted."""

    def make_clock(self) -> Clock:
        """Return the clock that leaves the launch gap out; on a CPU there is none."""
        if DEVICE == "cuda":
            return settled_clock(CudaQueue(), self.body)
        return super().make_clock()

    def facts(self) -> CaseFacts:
        """Say what the pass must move and compute for the experts that its rows do hit."""
        cost = layer_cost(self.moe, self.x)
        programs = None
        if self.backend != "reference":
            programs = experts_programs(**routed_operands(self.moe, self.x), backend=self.backend)
        return CaseFacts(bytes=cost.bytes, flops=cost.flops, programs=programs)

    def time_cold(self, num_tokens: int, moe_backend: str) -> None:
        del num_tokens, moe_backend
        self.body()


def rank_layer(config: TargetConfig, device: str, *, seed: int = 0) -> Moe:
    """Return the experts of the first layer of a rank that has some, packed in 4 bits."""
    first = config.first_k_dense_replace
    cut = replace(config, num_hidden_layers=first + 1)
    target = random_packed_target(cut, KIMI_EXPERTS, device=device, dtype=DTYPE, seed=seed)
    return _experts_of(target.layers[first].mlp)


def pair_layer() -> Moe:
    """Return the experts of the trained pair's last layer."""
    return _experts_of(preset("tiny", device=DEVICE, dtype=DTYPE).target.layers[-1].mlp)


def random_rows(num_tokens: int, moe: Moe, *, seed: int = 0) -> Tensor:
    """Return rows as a norm leaves them, [M, hidden]."""
    generator = torch.Generator().manual_seed(seed)
    shape = (num_tokens, moe.router.weight.shape[1])
    return torch.randn(shape, generator=generator).to(moe.router.weight)


def layer_cost(moe: Moe, x: Tensor) -> Cost:
    """Return bytes and FLOP of a pass: routed experts, router and shared expert."""
    routed, mlp, rows = routed_cost(moe, x), moe.shared, len(x)
    shared = () if mlp is None else (mlp.gate_proj, mlp.up_proj, mlp.down_proj)
    always = moe.router.weight.nbytes + sum(weight.nbytes for weight in shared)
    products = rows * (moe.router.weight.numel() + sum(map(_numbers, shared)))
    return Cost(bytes=routed.bytes + always, flops=routed.flops + 2 * products)


def routed_cost(moe: Moe, x: Tensor) -> Cost:
    """Return bytes and FLOP of the routed experts: each that is hit once, rows in and out."""
    ids = moe.router(x).expert_ids
    experts = (moe.gate_proj, moe.up_proj, moe.down_proj)
    num_hit = len(set(ids.flatten().tolist()))
    weights = num_hit * sum(weight.nbytes // weight.shape[0] for weight in experts)
    products = ids.numel() * sum(_numbers(weight) // weight.shape[0] for weight in experts)
    return Cost(bytes=weights + 2 * x.nbytes, flops=2 * products)


def routed_operands(moe: Moe, x: Tensor) -> dict[str, Any]:
    """Return the arguments of `grouped_experts` for these rows."""
    routing = moe.router(x)
    return {
        "x": x,
        "expert_ids": routing.expert_ids,
        "expert_weights": routing.expert_weights,
        **moe.stored_experts(),
    }


def _numbers(weight: Weight) -> int:
    return weight.shape.numel()


def _experts_of(mlp: object) -> Moe:
    if not isinstance(mlp, Moe):
        raise SuiteError(f"layer: expected one with experts, got {type(mlp).__name__}")
    return mlp
