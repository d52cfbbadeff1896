"""OLMo: layer norms without parameters, and as many heads of keys as of queries.

`olmo_1b` ties its head to the embeddings and `olmo_7b` does not, as published.

References: Groeneveld et al., OLMo, 2024.
"""

import functools

from fp4jax.models.config import ModelConfig

_olmo = functools.partial(ModelConfig, norm="layer", norm_eps=1e-5)

OLMO = {
    "olmo_tiny": _olmo(
        vocab_size=512,
        num_layers=4,
        d_model=128,
        num_heads=2,
        num_kv_heads=2,
        head_dim=64,
        d_ff=384,
    ),
    "olmo_38m": _olmo(
        vocab_size=8192,
        num_layers=8,
        d_model=512,
        num_heads=8,
        num_kv_heads=8,
        head_dim=64,
        d_ff=2048,
    ),
    "olmo_300m": _olmo(
        vocab_size=32_768,
        num_layers=16,
        d_model=1024,
        num_heads=8,
        num_kv_heads=8,
        head_dim=128,
        d_ff=4096,
    ),
    "olmo_1b": _olmo(
        vocab_size=50_304,
        num_layers=16,
        d_model=2048,
        num_heads=16,
        num_kv_heads=16,
        head_dim=128,
        d_ff=8192,
    ),
    "olmo_7b": _olmo(
        vocab_size=50_304,
        num_layers=32,
        d_model=4096,
        num_heads=32,
        num_kv_heads=32,
        head_dim=128,
        d_ff=11_008,
        tie_embeddings=False,
    ),
}
