"""A rank of the structure of Kimi K2.6's, small enough for a CPU."""

from dataclasses import replace

from engine.presets import KIMI as WHOLE
from engine.presets import KIMI_DRAFTER as WHOLE_DRAFTER
from engine.presets import rank_of

SMALL = rank_of(
    replace(
        WHOLE, hidden_size=64, num_hidden_layers=3, kv_lora_rank=32, q_lora_rank=24,
        qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16, n_routed_experts=16,
        num_experts_per_tok=4, moe_intermediate_size=256, intermediate_size=256, vocab_size=512,
        max_position_embeddings=4096,
    ),
    replace(
        WHOLE_DRAFTER, hidden_size=64, head_dim=16, intermediate_size=256, vocab_size=512,
        max_position_embeddings=4096, num_target_layers=3, target_layer_ids=(0, 1),
        mask_token_id=511, sliding_window=24,
    ),
    8,
)  # fmt: skip
