"""Models whose linear layers take an FP4 recipe, and the shapes they come in."""

from fp4jax.models.config import PRESETS as PRESETS
from fp4jax.models.config import ModelConfig as ModelConfig
from fp4jax.models.config import flops_per_token as flops_per_token
from fp4jax.models.transformer import Transformer as Transformer
from fp4jax.models.transformer import layer_paths as layer_paths
from fp4jax.models.transformer import num_params as num_params
