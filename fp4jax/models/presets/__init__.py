"""The models that come by name, one family a module.

Vocabularies are nominal: a run replaces them by its tokenizer's.
"""

from collections.abc import Mapping
from types import MappingProxyType

from fp4jax.models.config import ModelConfig
from fp4jax.models.presets.dense import DENSE
from fp4jax.models.presets.moe import MOE
from fp4jax.models.presets.nemotron_h import NEMOTRON_H
from fp4jax.models.presets.olmo import OLMO
from fp4jax.models.presets.qwen3 import QWEN3

PRESETS: Mapping[str, ModelConfig] = MappingProxyType(
    DENSE | OLMO | NEMOTRON_H | QWEN3 | MOE
)
