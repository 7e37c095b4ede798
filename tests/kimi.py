"""The published shapes of Kimi K2.6 and of its DFlash drafter; no weights."""

from engine.config import DrafterConfig, TargetConfig, YarnConfig

YARN = YarnConfig(factor=64, original_max_position_embeddings=4096)
KIMI = TargetConfig(
    hidden_size=7168,
    num_hidden_layers=61,
    num_attention_heads=64,
    kv_lora_rank=512,
    qk_nope_head_dim=128,
    qk_rope_head_dim=64,
    v_head_dim=128,
    n_routed_experts=384,
    num_experts_per_tok=8,
    n_shared_experts=1,
    moe_intermediate_size=2048,
    intermediate_size=18432,
    first_k_dense_replace=1,
    vocab_size=163840,
    max_position_embeddings=262144,
    q_lora_rank=1536,
    routed_scaling_factor=2.827,
    rms_norm_eps=1e-5,
    rope_theta=50000.0,
    yarn=YARN,
)
KIMI_DRAFTER = DrafterConfig(
    hidden_size=7168,
    num_hidden_layers=6,
    num_attention_heads=64,
    num_key_value_heads=8,
    head_dim=128,
    intermediate_size=18432,
    vocab_size=163840,
    max_position_embeddings=262144,
    num_target_layers=61,
    block_size=8,
    target_layer_ids=(1, 12, 24, 35, 47, 58),
    mask_token_id=163838,
    layer_types=("sliding_attention",) * 5 + ("full_attention",),
    sliding_window=2048,
    rope_theta=50000.0,
    yarn=YARN,
)
