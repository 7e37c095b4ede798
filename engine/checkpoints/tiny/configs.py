"""What the tiny pair looks like: a target of the DeepSeek-V3 family and a DFlash drafter."""

from engine.config import DrafterConfig, TargetConfig, YarnConfig
from engine.presets import MASK_TOKEN, NUM_BYTES

_YARN = YarnConfig(factor=32.0, original_max_position_embeddings=4096)

TARGET = TargetConfig(
    hidden_size=256,
    num_hidden_layers=4,
    num_attention_heads=4,
    kv_lora_rank=64,
    qk_nope_head_dim=32,
    qk_rope_head_dim=16,
    v_head_dim=32,
    n_routed_experts=12,
    num_experts_per_tok=3,
    n_shared_experts=1,
    moe_intermediate_size=64,
    intermediate_size=768,
    first_k_dense_replace=1,
    vocab_size=NUM_BYTES + 4,
    max_position_embeddings=131072,
    routed_scaling_factor=2.5,
    norm_topk_prob=True,
    rope_theta=50000.0,
    yarn=_YARN,
)

DRAFTER = DrafterConfig(
    hidden_size=256,
    num_hidden_layers=3,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,
    intermediate_size=384,
    vocab_size=NUM_BYTES + 4,
    max_position_embeddings=131072,
    num_target_layers=4,
    block_size=8,
    target_layer_ids=(0, 1, 2),
    mask_token_id=MASK_TOKEN,
    layer_types=("sliding_attention", "sliding_attention", "full_attention"),
    sliding_window=512,
    rope_theta=50000.0,
    rope_attention_factor=1.0,
    yarn=_YARN,
)
