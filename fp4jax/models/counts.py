"""How many parameters a model has, and how many FLOPs a token of it takes."""

import functools
import math

from flax import nnx

from fp4jax import policies
from fp4jax.models.config import PARTS, ModelConfig
from fp4jax.models.transformer import Transformer


def num_params(config: ModelConfig) -> int:
    """Returns the number of parameters, allocating none.

    Args:
      config: the model's.
    """
    return sum(_sizes(config).values())


def num_active_params(config: ModelConfig) -> int:
    """Returns the number of those that a token meets: of the experts, the chosen.

    Args:
      config: the model's.
    """
    return num_params(config) - _idle(config)


def flops_per_token(config: ModelConfig, *, sequence_length: int) -> int:
    """Returns the FLOPs of one training token: forward, and twice that for backward.

    flops = 6 * (weights that multiply) + 6 * attentions * t * h * e
            + 12 * mambas * (channels of all heads) * (numbers that each remembers)

    A causal query sees (t + 1) / 2 ~ t / 2 keys, each of which costs 2 e FLOPs in QK^T
    and 2 e in PV, in h heads. Mamba-2 writes to its state and reads it, however its
    scan goes about that. Of experts only the chosen count. Embedding look-ups, norms,
    convolutions, quantization and recomputation count as nothing, and nothing is
    subtracted for the boundaries of packed documents.

    Args:
      config: the model's.
      sequence_length: t, tokens of a row.
    """
    sizes = _sizes(config)
    weights = sum(size for path, size in sizes.items() if path.endswith("/kernel"))
    if config.tie_embeddings:
        weights += config.d_model * config.vocab_size
    flops = 6 * (weights - _idle(config))
    for kind in config.kinds:
        if "attention" in PARTS[kind]:
            flops += 6 * sequence_length * config.num_heads * config.head_dim
        if "mamba" in PARTS[kind]:
            assert config.mamba is not None  # as the config has checked
            flops += 12 * config.mamba.d_inner * config.mamba.d_state
    return flops


def _idle(config: ModelConfig) -> int:
    """Returns the number of parameters of the experts that a token is not sent to."""
    if config.moe is None:
        return 0
    matrices = sum(
        f"moe/{name}" in config.layers("E") for name in ("gate", "up", "down")
    )
    idle = config.moe.num_experts - config.moe.top_k
    expert = matrices * config.d_model * config.moe.d_expert
    return config.kinds.count("E") * idle * expert


@functools.lru_cache(maxsize=8)
def _sizes(config: ModelConfig) -> dict[str, int]:
    """Returns the number of elements of each parameter by its path."""
    model = nnx.eval_shape(
        lambda: Transformer(config, policies.bf16(config), rngs=nnx.Rngs(0))
    )
    params = nnx.to_flat_state(nnx.state(model, nnx.Param))
    return {
        "/".join(map(str, path)): math.prod(param.get_value().shape)
        for path, param in params
    }
