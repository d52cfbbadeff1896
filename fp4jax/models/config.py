"""The shape of a dense transformer: one frozen value, its presets and its FLOPs."""

import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, get_args

from fp4jax.numerics.checks import is_integer

Remat = Literal["none", "dots", "full"]

_COUNTS = (
    "vocab_size",
    "num_layers",
    "d_model",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "d_ff",
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A decoder-only transformer: RMSNorm, RoPE, grouped-query attention, SwiGLU.

    Attributes:
      num_kv_heads: heads of keys and values; each serves num_heads / num_kv_heads
        query heads.
      tie_embeddings: the output head is the transposed embedding table.
      remat: what the backward pass of a block recomputes: "none" of it, all but the
        products of its linear layers ("dots"), or everything but its input ("full").
      scan_layers: run equal consecutive layers as one `lax.scan`, which compiles a
        block once; False unrolls them, which compiles longer and runs a little faster.

    Raises:
      ValueError: a size that is no positive integer, a constant that is not positive
        and finite, heads that do not divide, an odd
        head_dim, an unknown remat.
    """

    vocab_size: int
    num_layers: int
    d_model: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    d_ff: int
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    tie_embeddings: bool = True
    remat: Remat = "dots"
    scan_layers: bool = True

    def __post_init__(self):
        for name in _COUNTS:
            value = getattr(self, name)
            if not (is_integer(value) and value > 0):
                raise ValueError(
                    f"ModelConfig: {name} must be a positive integer, got "
                    f"{name}={value!r}."
                )
        for name in ("rope_theta", "norm_eps"):
            value = getattr(self, name)
            if isinstance(value, bool) or not 0 < value < math.inf:
                raise ValueError(
                    f"ModelConfig: {name} must be positive and finite, got "
                    f"{name}={value!r}."
                )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                "ModelConfig: num_heads must be a multiple of num_kv_heads, got "
                f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}."
            )
        if self.head_dim % 2:
            raise ValueError(
                "ModelConfig: head_dim must be even, since RoPE rotates pairs, "
                f"got head_dim={self.head_dim}."
            )
        if self.remat not in get_args(Remat):
            raise ValueError(
                f"ModelConfig: remat must be one of {', '.join(get_args(Remat))}, "
                f"got remat={self.remat!r}."
            )


def flops_per_token(config: ModelConfig, *, sequence_length: int) -> int:
    """Returns the FLOPs of one training token: forward, and twice that for backward.

    flops = 6 * (weights that multiply) + 6 * L * t * h * e

    A causal query sees (t + 1) / 2 ~ t / 2 keys, each of which costs 2 e FLOPs in QK^T
    and 2 e in PV, in h heads and L layers. Embedding look-ups, norms, quantization and
    recomputation count as nothing, and nothing is subtracted for the boundaries of
    packed documents.
    """
    queries = config.num_heads * config.head_dim
    keys = config.num_kv_heads * config.head_dim
    attention = config.d_model * (2 * queries + 2 * keys)
    block = attention + 3 * config.d_model * config.d_ff
    weights = config.num_layers * block + config.d_model * config.vocab_size
    return 6 * weights + 6 * config.num_layers * sequence_length * queries


# Vocabularies are nominal: a run replaces them by its tokenizer's. The dense model of
# the UFP4 paper has 1.5B parameters of unpublished shape; `dense_1p5b` has that size in
# the proportions of its family.
PRESETS: Mapping[str, ModelConfig] = MappingProxyType(
    {
        "tiny": ModelConfig(
            vocab_size=512,
            num_layers=4,
            d_model=128,
            num_heads=2,
            num_kv_heads=1,
            head_dim=64,
            d_ff=384,
        ),
        "dense_10m": ModelConfig(
            vocab_size=8192,
            num_layers=8,
            d_model=256,
            num_heads=4,
            num_kv_heads=2,
            head_dim=64,
            d_ff=1024,
        ),
        "dense_35m": ModelConfig(
            vocab_size=8192,
            num_layers=10,
            d_model=512,
            num_heads=8,
            num_kv_heads=4,
            head_dim=64,
            d_ff=1536,
        ),
        "dense_125m": ModelConfig(
            vocab_size=32_768,
            num_layers=12,
            d_model=768,
            num_heads=12,
            num_kv_heads=4,
            head_dim=64,
            d_ff=2944,
        ),
        "dense_350m": ModelConfig(
            vocab_size=32_768,
            num_layers=28,
            d_model=1024,
            num_heads=16,
            num_kv_heads=4,
            head_dim=64,
            d_ff=2816,
        ),
        "dense_1p5b": ModelConfig(
            vocab_size=73_728,
            num_layers=28,
            d_model=2048,
            num_heads=16,
            num_kv_heads=4,
            head_dim=128,
            d_ff=6144,
        ),
    }
)
