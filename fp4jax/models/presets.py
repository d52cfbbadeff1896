"""The models that come by name."""

from collections.abc import Mapping
from types import MappingProxyType

from fp4jax.models.config import ModelConfig

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
