"""How many parameters a model has, and how many FLOPs a token of it takes."""

import math

import jax
from flax import nnx

from fp4jax import policies
from fp4jax.models.config import PARTS, ModelConfig
from fp4jax.models.transformer import Transformer
from fp4jax.nnx import layers


def num_params(config: ModelConfig) -> int:
    """Returns the number of parameters, allocating none."""
    leaves = jax.tree.leaves(nnx.state(_abstract(config), nnx.Param))
    return sum(math.prod(leaf.shape) for leaf in leaves)


def flops_per_token(config: ModelConfig, *, sequence_length: int) -> int:
    """Returns the FLOPs of one training token: forward, and twice that for backward.

    flops = 6 * (weights that multiply) + 6 * L * t * h * e

    A causal query sees (t + 1) / 2 ~ t / 2 keys, each of which costs 2 e FLOPs in QK^T
    and 2 e in PV, in h heads and L layers of attention. Embedding look-ups, norms,
    quantization and recomputation count as nothing, and nothing is subtracted for the
    boundaries of packed documents.
    """
    model = _abstract(config)
    weights = sum(math.prod(layer.module.kernel.shape) for layer in layers(model))
    weights += config.d_model * config.vocab_size  # the head
    attentions = sum("attention" in PARTS[kind] for kind in config.kinds)
    queries = config.num_heads * config.head_dim
    return 6 * weights + 6 * attentions * sequence_length * queries


def _abstract(config: ModelConfig) -> Transformer:
    """Returns the model with shapes in place of arrays."""
    return nnx.eval_shape(
        lambda: Transformer(config, policies.bf16(config), rngs=nnx.Rngs(0))
    )
