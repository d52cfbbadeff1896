"""The policies of runs: the published ones, and what studies change of them."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from fp4jax import policies, recipes
from fp4jax.models import ModelConfig
from fp4jax.numerics import E4M3, Scale
from fp4jax.policies import Policy

PolicyOf = Callable[[ModelConfig], Policy]

POLICIES: Mapping[str, PolicyOf] = MappingProxyType(
    {
        **policies.PRESETS,
        "ufp4_e4m3": lambda config: Policy(recipes.ufp4(Scale(E4M3))),
    }
)
