"""Nemotron-H: Mamba-2, MLPs of squared ReLU, and a few layers of attention.

The order of tokens reaches attention by way of Mamba-2 alone, without rotations.

References: NVIDIA, Nemotron-H, 2025.
"""

import functools

from fp4jax.models.config import MambaConfig, ModelConfig

_nemotron_h = functools.partial(
    ModelConfig, mlp="relu2", rope_theta=0.0, norm_eps=1e-5, tie_embeddings=False
)
_8B = "M-M-M-M*-" + 3 * "M-M-M-M-M*-" + "M-M-M-M-M-"

NEMOTRON_H = {
    "nemotron_h_tiny": _nemotron_h(
        vocab_size=512,
        num_layers=5,
        d_model=128,
        num_heads=2,
        num_kv_heads=1,
        head_dim=64,
        d_ff=640,
        blocks="M-M*-",
        mamba=MambaConfig(num_heads=4, head_dim=64, d_state=32, chunk=32),
    ),
    "nemotron_h_30m": _nemotron_h(
        vocab_size=8192,
        num_layers=11,
        d_model=512,
        num_heads=8,
        num_kv_heads=2,
        head_dim=64,
        d_ff=2688,
        blocks="M-M-M*-M-M-",
        mamba=MambaConfig(num_heads=16, head_dim=64, d_state=64, num_groups=2),
    ),
    "nemotron_h_300m": _nemotron_h(
        vocab_size=32_768,
        num_layers=26,
        d_model=1024,
        num_heads=8,
        num_kv_heads=2,
        head_dim=128,
        d_ff=5376,
        blocks=2 * "M-M-M-M*-" + "M-M-M-M-",
        mamba=MambaConfig(num_heads=32, head_dim=64, d_state=128, num_groups=4),
    ),
    "nemotron_h_8b": _nemotron_h(
        vocab_size=131_072,
        num_layers=52,
        d_model=4096,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        d_ff=21_504,
        blocks=_8B,
        mamba=MambaConfig(num_heads=128, head_dim=64, d_state=128, num_groups=8),
    ),
}
