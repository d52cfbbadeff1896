"""Mixtures of experts in the style of Ling 2.0: sigmoid scores, a bias that balances.

A dense block comes first, and every other has a shared expert. `moe_7p9b` and
`moe_124b` have the sizes of arXiv 2606.20381, whose shapes are not published; these are
chosen after Ling-mini and Ling-flash. In the sizes for studies the bias moves ten times
as fast: in some hundred steps it else stays behind the scores, and most tokens choose
one expert.

References: Ling Team, Ling 2.0, 2025.
"""

import functools

from fp4jax.models.config import ModelConfig, MoEConfig

_model = functools.partial(
    ModelConfig, qk_norm=True, rope_theta=600_000.0, tie_embeddings=False
)
_experts = functools.partial(
    MoEConfig, score="sigmoid", scaling=2.5, aux_weight=0.0, bias_rate=0.001
)
_of_studies = functools.partial(_experts, bias_rate=0.01)

MOE = {
    "moe_tiny": _model(
        vocab_size=512,
        num_layers=4,
        d_model=128,
        num_heads=2,
        num_kv_heads=1,
        head_dim=64,
        d_ff=384,
        blocks="TEEE",
        moe=_of_studies(num_experts=8, top_k=2, d_expert=96, d_shared=96),
    ),
    "moe_45m": _model(
        vocab_size=8192,
        num_layers=8,
        d_model=384,
        num_heads=6,
        num_kv_heads=2,
        head_dim=64,
        d_ff=1024,
        blocks="T" + 7 * "E",
        moe=_of_studies(num_experts=32, top_k=4, d_expert=128, d_shared=128),
    ),
    "moe_290m": _model(
        vocab_size=32_768,
        num_layers=12,
        d_model=768,
        num_heads=12,
        num_kv_heads=2,
        head_dim=64,
        d_ff=2048,
        blocks="T" + 11 * "E",
        moe=_of_studies(num_experts=32, top_k=4, d_expert=256, d_shared=256),
    ),
    "moe_7p9b": _model(
        vocab_size=157_184,
        num_layers=18,
        d_model=2048,
        num_heads=16,
        num_kv_heads=4,
        head_dim=128,
        d_ff=5120,
        blocks="T" + 17 * "E",
        moe=_experts(num_experts=128, top_k=8, d_expert=512, d_shared=1024),
    ),
    "moe_124b": _model(
        vocab_size=157_184,
        num_layers=38,
        d_model=4096,
        num_heads=32,
        num_kv_heads=4,
        head_dim=128,
        d_ff=9216,
        blocks="T" + 37 * "E",
        moe=_experts(num_experts=256, top_k=8, d_expert=1024, d_shared=1024),
    ),
}
