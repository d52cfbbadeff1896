"""What tests of several folders share."""

from fp4jax.models import ModelConfig

SMALL = ModelConfig(
    vocab_size=64,
    num_layers=2,
    d_model=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    d_ff=48,
)
