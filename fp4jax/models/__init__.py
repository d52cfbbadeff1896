"""Models whose linear layers take an FP4 recipe, and the shapes they come in."""

from fp4jax.models.config import MambaConfig as MambaConfig
from fp4jax.models.config import ModelConfig as ModelConfig
from fp4jax.models.config import MoEConfig as MoEConfig
from fp4jax.models.counts import flops_per_token as flops_per_token
from fp4jax.models.counts import num_active_params as num_active_params
from fp4jax.models.counts import num_params as num_params
from fp4jax.models.moe import Balance as Balance
from fp4jax.models.presets import PRESETS as PRESETS
from fp4jax.models.transformer import Transformer as Transformer
