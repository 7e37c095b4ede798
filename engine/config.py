"""Frozen configurations of the target, the drafter and the engine.

A configuration is checked once, when it is made, and never changed afterwards. Model fields keep
the names of the published checkpoints (DeepSeek-V3, DFlash), so that a `config.json` reads like
the dataclass. This module knows nothing about tensors, devices or files.
"""

import math
from dataclasses import dataclass

from engine.errors import BudgetError, ConfigError

PAGE_SIZES = (1, 16, 32, 64, 128)
MODES = ("ddtree", "dflash", "ar")
CACHE_LAYOUTS = ("paged", "hybrid")
KV_DTYPES = ("target", "fp8")
BUDGET_POLICIES = ("fixed", "shared", "adaptive")
GRAPHS = ("off", "buffers", "cuda")
MAX_NODE_BUDGET = 512  # the largest tree the verify kernels are tiled and tested for
MAX_SIZE = 2**31 - 1  # kernels count in int32
MAX_LAYERS = 4096  # each is a Python object with a name for every tensor, made before any is read
MAX_NUMBER = 1e18  # of a scale; what float32 can still square, and an int64 hold
LAYER_TYPES = ("full_attention", "sliding_attention")


def check_node_budget(node_budget: int, *, least: int) -> None:
    """Refuse a node budget outside `least..MAX_NODE_BUDGET` with a `BudgetError`."""
    if not _is_int(node_budget) or not least <= node_budget <= MAX_NODE_BUDGET:
        raise BudgetError(
            f"node_budget: expected an integer in {least}..{MAX_NODE_BUDGET}, got {node_budget!r} "
            "(draft nodes, root excluded; the verify kernels are tiled up to this)"
        )


def check_number(name: str, value: object, why: str, *, least: float = -MAX_NUMBER) -> None:
    """Refuse what is no number or outside `least..MAX_NUMBER` with a `ConfigError`."""
    if (
        isinstance(value, bool)
        or not isinstance(value, int | float)
        or not least <= value <= MAX_NUMBER  # false for NaN as well
    ):
        bounds = f"{least:g}..{MAX_NUMBER:g}"
        raise ConfigError(f"{name}: expected a number in {bounds}, got {value!r} ({why})")


def default_target_layer_ids(num_target_layers: int, num_taps: int) -> tuple[int, ...]:
    """Return the taps of a DFlash checkpoint that lists none: evenly spread, ends left out.

    Python's `round` (halves to even) is part of the definition.
    """
    if num_taps < 1 or num_target_layers < num_taps + 2:
        raise ConfigError(
            f"num_taps: expected 1..{num_target_layers - 2}, got {num_taps} "
            "(each tap reads another target layer, the last one is never tapped)"
        )
    if num_taps == 1:
        return (num_target_layers // 2,)
    step = (num_target_layers - 4) / (num_taps - 1)
    return tuple(round(1 + i * step) for i in range(num_taps))


@dataclass(frozen=True, slots=True)
class YarnConfig:
    """YaRN context extension of a rotary embedding."""

    factor: float
    original_max_position_embeddings: int
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    mscale: float = 1.0
    mscale_all_dim: float = 1.0

    def __post_init__(self) -> None:
        _require_positive(self, "original_max_position_embeddings")
        check_number("yarn.factor", self.factor, "times the original context", least=1.0)
        for name in ("beta_fast", "beta_slow"):
            value, least = getattr(self, name), 1.0 / MAX_NUMBER
            check_number(f"yarn.{name}", value, "rotations over that context", least=least)
        for name in ("mscale", "mscale_all_dim"):
            check_number(f"yarn.{name}", getattr(self, name), "lets q and k grow")
        if self.beta_fast < self.beta_slow:
            raise ConfigError(
                f"yarn.beta_fast, yarn.beta_slow: expected beta_fast >= beta_slow, got "
                f"{self.beta_fast}, {self.beta_slow} (rotations over the original context)"
            )
        grown, least = self.softmax_mscale, 1.0 / MAX_NUMBER
        check_number("yarn.mscale_all_dim: growth of q and k", grown, "a divisor", least=least)

    @property
    def softmax_mscale(self) -> float:
        """The factor m by which q and k each grow; attention scores are multiplied by m * m."""
        return 0.1 * self.mscale_all_dim * math.log(self.factor) + 1.0

    @property
    def rope_mscale(self) -> float:
        """The amplitude of cos and sin: 1 where `mscale` equals `mscale_all_dim`."""
        return (0.1 * self.mscale * math.log(self.factor) + 1.0) / self.softmax_mscale


@dataclass(frozen=True, slots=True)
class TargetConfig:
    """A target of the DeepSeek-V3 family: MLA attention, sigmoid-routed experts."""

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_shared_experts: int
    moe_intermediate_size: int
    intermediate_size: int
    first_k_dense_replace: int
    vocab_size: int
    max_position_embeddings: int
    q_lora_rank: int | None = None
    routed_scaling_factor: float = 1.0
    norm_topk_prob: bool = True
    n_group: int = 1
    topk_group: int = 1
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    yarn: YarnConfig | None = None

    def __post_init__(self) -> None:
        _require_positive(self, *_TARGET_SIZES)
        if self.q_lora_rank is not None:
            _require_positive(self, "q_lora_rank")
        _require_rope(self.qk_rope_head_dim, "qk_rope_head_dim")
        _require_scales(self, "rms_norm_eps", "rope_theta", "routed_scaling_factor")
        _require_bool("norm_topk_prob", self.norm_topk_prob)
        _require_range("n_shared_experts", self.n_shared_experts, 0, None, "0 = none")
        _require_range(
            "first_k_dense_replace",
            self.first_k_dense_replace,
            0,
            self.num_hidden_layers,
            "the leading layers with a dense MLP",
        )
        self._check_routing()

    def _check_routing(self) -> None:
        if self.n_routed_experts % self.n_group:
            raise ConfigError(
                f"n_group: expected a divisor of n_routed_experts = {self.n_routed_experts}, got "
                f"{self.n_group} (groups are of equal size)"
            )
        _require_range("topk_group", self.topk_group, 1, self.n_group, "groups kept by the router")
        reachable = self.topk_group * self.experts_per_group
        _require_range(
            "num_experts_per_tok", self.num_experts_per_tok, 1, reachable, "experts of kept groups"
        )
        if self.n_group > 1 and self.experts_per_group < 2:
            raise ConfigError(
                f"n_group: expected groups of at least 2 experts, got {self.experts_per_group} "
                "(a group's score is the sum of its best two)"
            )

    @property
    def experts_per_group(self) -> int:
        """Experts in one routing group."""
        return self.n_routed_experts // self.n_group

    @property
    def latent_dim(self) -> int:
        """Width D of a latent KV row, `[c_kv ; k_rope]`."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def qk_head_dim(self) -> int:
        """Width of one query or key head before absorption."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def softmax_scale(self) -> float:
        """What attention scores are multiplied by, YaRN's correction included."""
        scale: float = self.qk_head_dim**-0.5
        return scale if self.yarn is None else scale * self.yarn.softmax_mscale**2


_TARGET_SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "n_routed_experts",
    "n_group",
    "moe_intermediate_size",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
)


@dataclass(frozen=True, slots=True)
class DrafterConfig:
    """A DFlash block-diffusion drafter: grouped-query attention over the target's taps.

    It has no embedding and no output head of its own, so `hidden_size` and `vocab_size` are the
    target's. Tap `i` is the target's residual stream after its 0-based layer `i`.
    """

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    num_target_layers: int
    block_size: int
    target_layer_ids: tuple[int, ...]
    mask_token_id: int
    layer_types: tuple[str, ...]
    sliding_window: int | None = None
    is_block_causal: bool = False  # sliding layers only; full layers never are
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10000.0
    rope_attention_factor: float = 1.0  # amplitude of cos and sin
    yarn: YarnConfig | None = None

    def __post_init__(self) -> None:
        _require_positive(self, *_DRAFTER_SIZES)
        _require_rope(self.head_dim, "head_dim")
        _require_scales(self, "rms_norm_eps", "rope_theta")
        check_number("rope_attention_factor", self.rope_attention_factor, "an amplitude")
        if self.num_attention_heads % self.num_key_value_heads:
            raise ConfigError(
                f"num_key_value_heads: expected a divisor of num_attention_heads = "
                f"{self.num_attention_heads}, got {self.num_key_value_heads} (query groups)"
            )
        most = 1 + MAX_NODE_BUDGET
        _require_range("block_size", self.block_size, 2, most, "the anchor and a tree's depths")
        _require_range("mask_token_id", self.mask_token_id, 0, self.vocab_size - 1, "a token id")
        self._check_taps()
        self._check_layers()

    def _check_taps(self) -> None:
        taps, last = self.target_layer_ids, self.num_target_layers - 2
        is_ascending = all(map(_is_int, taps)) and list(taps) == sorted(set(taps))
        if not taps or not is_ascending or taps[0] < 0 or taps[-1] > last:
            raise ConfigError(
                f"target_layer_ids: expected ascending layers in 0..{last}, got {taps} "
                "(the last layer is never tapped)"
            )

    def _check_layers(self) -> None:
        are_known = all(kind in LAYER_TYPES for kind in self.layer_types)
        if len(self.layer_types) != self.num_hidden_layers or not are_known:
            raise ConfigError(
                f"layer_types: expected {self.num_hidden_layers} of {LAYER_TYPES}, got "
                f"{self.layer_types} (one for each layer)"
            )
        if "sliding_attention" in self.layer_types:
            _require_range(
                "sliding_window", self.sliding_window, 1, None, "keys of a sliding layer"
            )

    @property
    def horizon(self) -> int:
        """Draft positions of a block: all but the anchor."""
        return self.block_size - 1


_DRAFTER_SIZES = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "intermediate_size",
    "vocab_size",
    "max_position_embeddings",
    "num_target_layers",
)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """What the caller chose for one engine, checked when made; nothing is replaced silently.

    Parameters
    ----------
    mode : "ddtree", "dflash" or "ar"
        A draft tree; its linear form, the likeliest token of each depth; no drafts at all.
    node_budget : int
        Draft nodes of a sequence's tree, root excluded.
    page_size : int
        Rows of a KV page, one of `PAGE_SIZES`.
    max_context, prefill_chunk : int
        Most tokens of a sequence, prompt and new ones, and of one prefill pass over its prompt.
    budget_policy : "fixed", "shared" or "adaptive"
        Every sequence gets `node_budget` nodes; the sequences of a batch share as many as that
        would be, the likeliest first; or they share fewer where a measured cost table says that
        more would not pay.
    cache_layout : "paged" or "hybrid"
        A tree's rows lie in pages behind the prefix, or in a dense scratch until they commit.
    kv_dtype : "target" or "fp8"
        Cached rows are numbers of the target's dtype, or bytes as `quantize_rows` makes them.
    prefix_reuse : bool
        Whether prompts start from pages of earlier ones that begin alike.
    drafter_context : int, optional
        Most keys a row of a full drafter layer sees; None = all. It changes commit lengths only.
    num_pages : int, optional
        Size of the pool. None lets it grow with what the batches need for `max_context`.
    attention_backend, moe_backend, tree_backend : str
        Implementations of `tree_attention`; of `choose_experts` and `grouped_experts`; of
        `draft_tree` and `walk_tree`, where trees stay on the device. Checked where these are known.
    graphs : "off", "cuda" or "buffers"
        Every verify pass is launched operation by operation; passes of one shape are captured in
        a CUDA graph and replayed; they run in the buffers of such graphs, but are none.
    """

    node_budget: int = 16
    page_size: int = 16
    attention_backend: str = "reference"
    num_pages: int | None = None
    max_context: int = 4096
    prefill_chunk: int = 64
    mode: str = "ddtree"
    budget_policy: str = "fixed"
    cache_layout: str = "paged"
    prefix_reuse: bool = False
    drafter_context: int | None = None
    moe_backend: str = "reference"
    graphs: str = "off"
    tree_backend: str = "host"
    kv_dtype: str = "target"

    def __post_init__(self) -> None:
        check_node_budget(self.node_budget, least=1)
        check_page_size(self.page_size)
        for name in ("num_pages", "drafter_context"):
            if getattr(self, name) is not None:
                _require_positive(self, name)
        _require_positive(self, "max_context", "prefill_chunk")
        choices = (MODES, BUDGET_POLICIES, CACHE_LAYOUTS, GRAPHS, KV_DTYPES)
        names = ("mode", "budget_policy", "cache_layout", "graphs", "kv_dtype")
        for name, allowed in zip(names, choices, strict=True):
            _require_choice(name, getattr(self, name), allowed)
        _require_bool("prefix_reuse", self.prefix_reuse)


def check_page_size(page_size: int) -> None:
    """Refuse a page size the kernels do not have with a `ConfigError`."""
    if not _is_int(page_size) or page_size not in PAGE_SIZES:
        raise ConfigError(
            f"page_size: expected one of {PAGE_SIZES}, got {page_size!r} (rows of a KV page)"
        )


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _require_positive(config: object, *names: str) -> None:
    for name in names:
        most = MAX_LAYERS if name.endswith("_layers") else None
        _require_range(name, getattr(config, name), 1, most, type(config).__name__)


def _require_range(name: str, value: int | None, least: int, most: int | None, why: str) -> None:
    most = MAX_SIZE if most is None else most
    if value is None or not _is_int(value) or not least <= value <= most:
        raise ConfigError(f"{name}: expected an integer in {least}..{most}, got {value!r} ({why})")


def _require_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise ConfigError(f"{name}: expected True or False, got {value!r} (a switch)")


def _require_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ConfigError(
            f"{name}: expected one of {', '.join(choices)}, got {value!r} (no silent fall-back)"
        )


def _require_rope(dim: int, name: str) -> None:
    if dim % 2:
        raise ConfigError(f"{name}: expected an even number, got {dim} (rotated in pairs)")


def _require_scales(config: TargetConfig | DrafterConfig, *names: str) -> None:
    for name in names:
        # YaRN divides by the logarithm of its base.
        least = 1.0 + 1e-6 if name == "rope_theta" else 1.0 / MAX_NUMBER
        check_number(name, getattr(config, name), "a scale", least=least)
