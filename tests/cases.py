"""What tests of several folders share."""

from fp4jax import recipes
from fp4jax.models import ModelConfig
from fp4jax.policies import Policy, Rule

SMALL = ModelConfig(
    vocab_size=64,
    num_layers=2,
    d_model=32,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    d_ff=48,
)


def in_mlp_down(recipe):
    """A policy of one quantized linear a block: what shows there holds for all."""
    return Policy(recipes.bf16(), (Rule("*/mlp/down", recipe),))
