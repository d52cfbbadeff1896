"""Qwen3 mixtures of experts: no shared expert, softmax scores, an auxiliary loss.

In the sizes for studies it weighs ten times what is published: in some hundred steps of
a high learning rate, that lets most tokens choose one expert.

References: Yang et al., Qwen3, 2025.
"""

import functools

from fp4jax.models.config import ModelConfig, MoEConfig

_qwen3 = functools.partial(
    ModelConfig, blocks="E", qk_norm=True, rope_theta=1e6, tie_embeddings=False
)
_experts = functools.partial(MoEConfig, aux_weight=0.01)

QWEN3 = {
    "qwen3_tiny": _qwen3(
        vocab_size=512,
        num_layers=4,
        d_model=128,
        num_heads=2,
        num_kv_heads=1,
        head_dim=64,
        d_ff=384,
        moe=_experts(num_experts=8, top_k=2, d_expert=96),
    ),
    "qwen3_47m": _qwen3(
        vocab_size=8192,
        num_layers=8,
        d_model=384,
        num_heads=6,
        num_kv_heads=2,
        head_dim=64,
        d_ff=1024,
        moe=_experts(num_experts=32, top_k=4, d_expert=128),
    ),
    "qwen3_300m": _qwen3(
        vocab_size=32_768,
        num_layers=12,
        d_model=768,
        num_heads=8,
        num_kv_heads=2,
        head_dim=128,
        d_ff=2048,
        moe=_experts(num_experts=32, top_k=4, d_expert=256),
    ),
    "qwen3_700m": _qwen3(
        vocab_size=32_768,
        num_layers=12,
        d_model=1024,
        num_heads=8,
        num_kv_heads=2,
        head_dim=128,
        d_ff=3072,
        moe=_experts(num_experts=64, top_k=8, d_expert=256),
    ),
    "qwen3_30b_a3b": _qwen3(
        vocab_size=151_936,
        num_layers=48,
        d_model=2048,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        d_ff=6144,
        moe=MoEConfig(num_experts=128, top_k=8, d_expert=768),
    ),
}
