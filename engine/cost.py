"""What one step cannot do without: bytes that must be read and arithmetic that must be done.

For N sequences of S committed tokens and trees of T tokens (root included), e bytes a number::

    target rows    N * T                            drafter rows   N * block_size
    KV bytes       e * D * layers * N * (S + T)     drafter's      e * 2 * H_kv * d_h * N * sum over
                                                    layers of min(S, window - 1) + block_size
    weights        every matrix once, the output head once for each model; of the routed experts
                   those that are hit: E * (1 - (1 - K / E) ** rows) if routing were independent;
                   of the embedding its rows
      plain        e a number
      fp8          1 a number + 4 a block of its scales (128 x 128: 1.0002 a number)
      int4         1/2 a number + e' a group of its scales (bf16, 32: 0.5625 a number)
    attention      2 * H * (D + kv_lora_rank) * rows * (S + T) multiply-adds counted as two

Activations, norms and the one new context row of the drafter are left out; they are not what a
step's time is made of. Correlated routing hits fewer experts, so the expert bytes are an estimate
from above.
"""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from math import prod

import torch

from engine.budget import CostOrigin, CostTable, tree_budget
from engine.config import DrafterConfig, EngineConfig, TargetConfig
from engine.context_rows import REWIND_ROWS
from engine.drafter import DraftModel, drafter_shapes
from engine.errors import ConfigError
from engine.kernels import Cost, fp8_row_bytes
from engine.quantized import Weight, quantization_of
from engine.target import Shape, Target, target_shapes

EMBEDDING = "model.embed_tokens.weight"
FLOAT32_BYTES = 4


@dataclass(frozen=True, slots=True)
class StepShape:
    """The sizes a step's cost depends on."""

    context_len: int  # S, committed tokens of each sequence
    tree_size: int  # T, root included
    num_seqs: int = 1
    itemsize: int = 2  # bytes of a weight or a cached number
    drafter_context: int | None = None  # most keys of a full drafter layer; None = all
    kv_dtype: str = "target"  # of cached rows, as `EngineConfig` says

    @property
    def num_rows(self) -> int:
        """Rows of the target's pass."""
        return self.num_seqs * self.tree_size


def step_bytes(
    target: Target,
    drafter: DraftModel | None,
    shape: StepShape,
    *,
    experts_hit: float | None = None,
) -> Cost:
    """Return the least bytes and FLOP of one step; `kv_bytes` is both models' caches.

    The target's weights are counted as they are stored, quantised or not. Without a drafter a
    step is its verify pass. `experts_hit` as in `verify_cost`.
    """
    stored = weight_bytes(target.tensors)
    verify = verify_cost(target.config, shape, stored, experts_hit=experts_hit)
    if drafter is None:
        return verify
    draft = draft_cost(drafter.config, shape)
    return Cost(
        bytes=verify.bytes + draft.bytes,
        flops=verify.flops + draft.flops,
        kv_bytes=verify.kv_bytes + draft.kv_bytes,
    )


def stage_costs(
    target: Target, drafter: DraftModel, shape: StepShape, *, experts_hit: float | None = None
) -> dict[str, Cost]:
    """Return the least bytes and FLOP of each stage of a step; the sum is `step_bytes` and logits.

    Building reads the draft logits once. Nothing has to move for a commit: accepted rows may lie
    where they stay. `experts_hit` as in `verify_cost`.
    """
    drafts = drafter.config
    logits = shape.num_seqs * drafts.horizon * drafts.vocab_size * FLOAT32_BYTES
    return {
        "draft": draft_cost(drafts, shape),
        "build": Cost(bytes=logits, flops=0),
        "verify": verify_cost(
            target.config, shape, weight_bytes(target.tensors), experts_hit=experts_hit
        ),
        "commit": Cost(bytes=0, flops=0),
    }


def cost_origin(target: Target, drafter: DraftModel | None, config: EngineConfig) -> CostOrigin:
    """Return what a cost table of this engine holds for: machine, versions, models, layout."""
    device = target.device
    stored = sorted({str(quantization_of(weight)) for weight in target.tensors.values()})
    models = f"{target.config} {None if drafter is None else drafter.config} {stored}"
    return CostOrigin(
        device_name=torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        torch_version=str(torch.__version__),
        dtype=str(target.dtype).removeprefix("torch."),
        attention_backend=config.attention_backend,
        moe_backend=config.moe_backend,
        graphs=config.graphs,
        page_size=config.page_size,
        cache_layout=config.cache_layout,
        model=hashlib.sha256(models.encode()).hexdigest()[:16],
    )


def check_costs(
    target: Target, drafter: DraftModel | None, config: EngineConfig, cost_table: CostTable | None
) -> None:
    """Refuse a cost table of another engine, or none where the policy weighs with it."""
    if cost_table is not None:
        cost_table.check_origin(cost_origin(target, drafter, config))
    elif config.budget_policy == "adaptive":
        raise ConfigError(
            "cost_table: expected one, got None (budget policy 'adaptive' weighs nodes by what "
            "they cost here: measure_costs)"
        )


def weight_bytes(weights: Mapping[str, Weight]) -> dict[str, int]:
    """Return the bytes of every weight as it is stored, scales included."""
    return {name: weight.nbytes for name, weight in weights.items()}


@dataclass(frozen=True, slots=True)
class ResidentBytes:
    """What an engine keeps on its device between two steps; a pass needs room beside it."""

    target_weights: int
    drafter_weights: int
    latent_pages: int
    drafter_context: int  # at most: its buffers double when they are full
    tree_scratch: int

    @property
    def total(self) -> int:
        """Their sum."""
        return sum(getattr(self, name) for name in self.__slots__)


def resident_bytes(
    target: Target, drafter: DraftModel | None, config: EngineConfig, *, num_seqs: int = 1
) -> ResidentBytes:
    """Return what an engine keeps for `num_seqs` sequences of up to `max_context` tokens.

    Weights may be on the device `meta`: nothing is looked at but shapes and dtypes.
    """
    itemsize, sizes = target.dtype.itemsize, target.config
    drafts = None if drafter is None or config.mode == "ar" else drafter.config
    num_pages = config.num_pages or pool_pages(config, drafts, num_seqs)
    rows = num_pages * config.page_size
    features = drafts.hidden_size if drafts is not None and config.prefix_reuse else 0
    tree_rows = num_seqs * (1 + most_nodes(config, drafts, num_seqs))
    is_hybrid = config.cache_layout == "hybrid"
    num_latent = partial(latent_bytes, sizes, itemsize=itemsize, kv_dtype=config.kv_dtype)
    context = 0
    if drafts is not None:
        kept = drafter_kv_bytes(
            drafts,
            2 * config.max_context,
            itemsize=itemsize,
            drafter_context=config.drafter_context,
        )
        spare = draft_row_bytes(drafts, itemsize=itemsize) * (drafts.block_size + REWIND_ROWS)
        context = num_seqs * (kept + spare)
    return ResidentBytes(
        target_weights=sum(weight_bytes(target.tensors).values()),
        drafter_weights=0 if drafter is None else _drafter_bytes(drafter.config, itemsize),
        latent_pages=num_latent(rows) + rows * features * itemsize,
        drafter_context=context,
        tree_scratch=num_latent(tree_rows) if is_hybrid else 0,
    )


def most_nodes(config: EngineConfig, drafter: DrafterConfig | None, num_seqs: int) -> int:
    """Return how many draft nodes one tree can have in a batch of `num_seqs`; None drafts none."""
    if drafter is None:
        return 0
    most = tree_budget(config.budget_policy, config.node_budget, num_seqs)
    return min(most, drafter.horizon) if config.mode == "dflash" else most


def pool_pages(config: EngineConfig, drafter: DrafterConfig | None, num_seqs: int) -> int:
    """Return the pages that `num_seqs` sequences of `max_context` tokens need with their trees."""
    ahead = most_nodes(config, drafter, num_seqs)
    if drafter is not None and config.cache_layout == "hybrid":
        ahead = min(ahead, drafter.horizon)  # pages get the accepted path only
    return num_seqs * -(-(config.max_context + ahead) // config.page_size)


def latent_bytes(
    config: TargetConfig, num_tokens: int, *, itemsize: int, kv_dtype: str = "target"
) -> int:
    """Return the bytes of the target's latent rows of `num_tokens` tokens, all layers.

    `itemsize` is that of the target's numbers, which rows in fp8 are none of.
    """
    row = config.latent_dim * itemsize
    if kv_dtype == "fp8":
        row = fp8_row_bytes(config.kv_lora_rank, config.qk_rope_head_dim)
    return config.num_hidden_layers * row * num_tokens


def drafter_kv_bytes(
    config: DrafterConfig, num_tokens: int, *, itemsize: int, drafter_context: int | None = None
) -> int:
    """Return the bytes a drafter reads of its context of `num_tokens` tokens, all layers.

    `drafter_context` bounds the keys that a row of a full layer sees, as in `EngineConfig`.
    """
    row = 2 * config.num_key_value_heads * config.head_dim * itemsize
    windows = {"sliding_attention": config.sliding_window, "full_attention": drafter_context}
    seen = (windows[kind] for kind in config.layer_types)
    return row * sum(num_tokens if w is None else min(num_tokens, w - 1) for w in seen)


def expected_experts_hit(config: TargetConfig, num_rows: int) -> float:
    """Return the mean number of distinct experts of a layer that independent rows would hit."""
    experts = config.n_routed_experts
    return experts * (1.0 - (1.0 - config.num_experts_per_tok / experts) ** num_rows)


def verify_cost(
    config: TargetConfig,
    shape: StepShape,
    stored_bytes: Mapping[str, int] | None = None,
    *,
    experts_hit: float | None = None,
) -> Cost:
    """Return the cost of the target's pass over the trees.

    Parameters
    ----------
    config, shape
    stored_bytes : mapping of str to int, optional
        Of every tensor, as `weight_bytes` gives them; None = plain numbers of `shape.itemsize`.
    experts_hit : float, optional
        Distinct routed experts that a layer reads, the mean; None = as if rows chose independently.
    """
    rows, seen = shape.num_rows, shape.context_len + shape.tree_size
    hit = expected_experts_hit(config, rows) if experts_hit is None else experts_hit
    is_read = {"experts": hit / config.n_routed_experts}
    is_used = {"experts": config.num_experts_per_tok / config.n_routed_experts}
    shapes = target_shapes(config)
    numbers = {name: prod(size) for name, size in shapes.items()}
    stored = stored_bytes or {name: size * shape.itemsize for name, size in numbers.items()}
    embedded = stored[EMBEDDING] * rows / config.vocab_size
    others = {name: size for name, size in stored.items() if name != EMBEDDING}
    matrices = {name: numbers[name] for name in _matrices(shapes) if name != EMBEDDING}
    kv_bytes = shape.num_seqs * latent_bytes(
        config, seen, itemsize=shape.itemsize, kv_dtype=shape.kv_dtype
    )
    width = config.latent_dim + config.kv_lora_rank
    attention = config.num_hidden_layers * config.num_attention_heads * width * rows * seen
    return Cost(
        bytes=round(_total(others, is_read) + embedded) + kv_bytes,
        flops=2 * (round(_total(matrices, is_used) * rows) + attention),
        kv_bytes=kv_bytes,
    )


def draft_cost(config: DrafterConfig, shape: StepShape) -> Cost:
    """Return the cost of drafting one block for each sequence, output head included."""
    rows = shape.num_seqs * config.block_size
    context_bytes = drafter_kv_bytes(
        config,
        shape.context_len,
        itemsize=shape.itemsize,
        drafter_context=shape.drafter_context,
    )
    block_bytes = draft_row_bytes(config, itemsize=shape.itemsize) * config.block_size
    kv_bytes = shape.num_seqs * (context_bytes + block_bytes)
    head = config.vocab_size * config.hidden_size
    shapes = drafter_shapes(config)
    layers = {name: matrix for name, matrix in shapes.items() if name.startswith("layers.")}
    seen = kv_bytes // (2 * shape.itemsize * config.head_dim * config.num_key_value_heads)
    attention = 2 * config.num_attention_heads * config.head_dim * config.block_size * seen
    numbers = sum(map(prod, shapes.values())) + head + rows * config.hidden_size
    products = sum(map(prod, _matrices(layers).values())) * rows
    products += head * shape.num_seqs * config.horizon
    products += prod(shapes["fc.weight"]) * shape.num_seqs
    return Cost(
        bytes=numbers * shape.itemsize + kv_bytes,
        flops=2 * (products + attention),
        kv_bytes=kv_bytes,
    )


def draft_row_bytes(config: DrafterConfig, *, itemsize: int) -> int:
    """Return the bytes of one token's keys and values in all layers of a drafter."""
    heads = config.num_key_value_heads * config.head_dim
    return 2 * heads * config.num_hidden_layers * itemsize


def _drafter_bytes(config: DrafterConfig, itemsize: int) -> int:
    return itemsize * sum(map(prod, drafter_shapes(config).values()))


def _matrices(shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    return {name: shape for name, shape in shapes.items() if len(shape) > 1}


def _total(sizes: Mapping[str, int], shares: Mapping[str, float]) -> float:
    """Sum the sizes of tensors, those with a part of their name in `shares` by that share."""
    return sum(
        size * next((share for part, share in shares.items() if part in name.split(".")), 1.0)
        for name, size in sizes.items()
    )
