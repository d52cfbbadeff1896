"""The models that many short runs train, and how long: wide and shallow for speed.

Where a vector has some hundred numbers, a step waits for memory, and what it moves
grows with width times depth, where FLOPs grow with the square of the width. A scan over
layers would copy what the backward pass needs into stacks, a fourth of a step's time.
"""

import dataclasses
import functools
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

from fp4jax.models import ModelConfig, MoEConfig

_VOCAB = 8192  # replaced by the tokenizer's


class Training(NamedTuple):
    """How a model is trained.

    Attributes:
      tokens: of a run.
      rows: of a batch.
      tried: part of the tokens on which a learning rate is tried.
    """

    tokens: int
    rows: int
    tried: float = 0.25


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
        "dense_3m": _dense(4, 192, 512),
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

# Some twenty tokens for each parameter, in 2,400 to 3,400 steps. Losses fall fastest
# from the 200th to the 800th, those of the smallest model later: seeds of runs that end
# there lie far apart, and the rate that is the best there need not be the best of
# longer runs.
TRAINING: Mapping[str, Training] = MappingProxyType(
    {
        "dense_2m": Training(tokens=40_000_000, rows=32, tried=0.5),
        "dense_3m": Training(tokens=62_000_000, rows=48, tried=0.5),
        "dense_4m": Training(tokens=97_000_000, rows=64, tried=0.5),
        "dense_9m": Training(tokens=180_000_000, rows=128),
        "dense_18m": Training(tokens=370_000_000, rows=256),
        "dense_35m": Training(tokens=650_000_000, rows=512),
        "moe_11m": Training(tokens=220_000_000, rows=128),
    }
)
