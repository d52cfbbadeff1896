"""The shapes of models that many short runs train, wide and shallow for speed.

Where a vector has some hundred numbers, a step waits for memory, and what it moves
grows with width times depth, where FLOPs grow with the square of the width. A scan over
layers would copy what the backward pass needs into stacks, a fourth of a step's time.
"""

import dataclasses
import functools
from collections.abc import Mapping
from types import MappingProxyType

from fp4jax.models import ModelConfig, MoEConfig

_VOCAB = 8192  # replaced by the tokenizer's


def _dense(layers: int, width: int, hidden: int) -> ModelConfig:
    """Returns a model of heads of 64, half as many or fewer of keys and values."""
    heads = width // 64
    return ModelConfig(
        vocab_size=_VOCAB,
        num_layers=layers,
        d_model=width,
        num_heads=heads,
        num_kv_heads=next(n for n in (2, 1) if heads % n == 0),
        head_dim=64,
        d_ff=hidden,
        remat="none",
        scan_layers=False,
    )


_experts = functools.partial(
    MoEConfig,
    top_k=2,
    score="sigmoid",
    scaling=2.5,
    aux_weight=0.0,
    bias_rate=0.01,
)

SHAPES: Mapping[str, ModelConfig] = MappingProxyType(
    {
        "tiny": _dense(2, 64, 128),
        "dense_2m": _dense(4, 128, 384),
        "dense_4m": _dense(4, 256, 640),
        "dense_9m": _dense(4, 384, 896),
        "dense_18m": _dense(5, 512, 1408),
        "dense_35m": _dense(10, 512, 1408),
        # One block with an MLP, then three mixtures with a shared expert.
        "moe_11m": dataclasses.replace(
            _dense(4, 256, 768),
            blocks="TEEE",
            qk_norm=True,
            tie_embeddings=False,
            moe=_experts(num_experts=16, d_expert=128, d_shared=128),
        ),
        "moe_tiny": dataclasses.replace(
            _dense(2, 64, 128),
            blocks="TE",
            moe=_experts(num_experts=4, d_expert=64, d_shared=64),
        ),
    }
)
