"""What whole training steps are measured under, by name.

A policy as for experiments.pretrain, such as "ufp4"; one with changes of its recipes,
"ufp4+packed" or "ti2d+fp8"; or "qwix", the NVFP4 of another library.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

from flax import nnx

from experiments import named
from experiments.kernels import with_qwix
from experiments.presets import ExperimentConfig
from fp4jax import policies
from fp4jax.models import ModelConfig, Transformer
from fp4jax.policies import Policy, Rule
from fp4jax.recipes import Recipe

QWIX = "qwix"
CHANGES = ("fp8", "packed")


@dataclasses.dataclass(frozen=True)
class Case:
    """A model to train.

    Attributes:
      name: as the command line has it.
      make_model: returns the model, with its initial weights.
      tracing: the context of all that is traced.
      about: what else a row of results tells.
    """

    name: str
    make_model: Callable[[], Transformer]
    tracing: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    about: dict[str, Any] = dataclasses.field(default_factory=dict)


def find(name: str, config: ExperimentConfig) -> Case:
    """Returns the case of a name.

    Raises:
      ValueError: there is none.
      ModuleNotFoundError: it takes a library that is not there.
    """
    if name == QWIX:
        tokens = config.data.batch_size * config.data.sequence_length
        make = lambda: with_qwix.transformer(config.model, tokens=tokens)
        return Case(name, make, with_qwix.emulated, with_qwix.about())
    policy = policy_of(name, config)
    return Case(name, lambda: Transformer(config.model, policy, rngs=nnx.Rngs(0)))


def policy_of(name: str, config: ExperimentConfig) -> Policy:
    """Returns the policy of a name such as "ti2d+fp8".

    Raises:
      ValueError: there is none.
    """
    base, *changes = name.split("+")
    is_named = base in policies.PRESETS or ":" in base
    if not is_named or not set(changes) <= set(CHANGES):
        raise ValueError(
            f"policy: must be {QWIX}, {named.OWN}, or one of "
            f"{', '.join(policies.PRESETS)}, with "
            f"{' or '.join('+' + change for change in CHANGES)} or not, got {name!r}."
        )
    policy = named.policy(base, flag="policy")(config.model)
    if "fp8" in changes:
        policy = _in_fp8(policy, config.model)
    return policy.map(_packed) if "packed" in changes else policy


def _in_fp8(policy: Policy, config: ModelConfig) -> Policy:
    """Returns a policy whose GEMMs may run in FP8; those of groups cannot."""
    experts = (
        Rule(path, policy.recipe(path))
        for path in config.layer_paths
        if path.split("/")[2:-1] == ["moe"]
    )
    found = policy.map(lambda r: dataclasses.replace(r, compute="fp8"))
    return dataclasses.replace(found, rules=(*experts, *found.rules))


def _packed(recipe: Recipe) -> Recipe:
    """Returns a recipe that packs what it saves, where it saves what can be packed."""
    if recipe.packed_site is None:
        return recipe
    return dataclasses.replace(recipe, residuals="packed")


def known() -> Iterator[str]:
    """Yields the names that the command takes by default, bf16 first."""
    yield from ("bf16", "ufp4", "nvfp4", "ue5m3", "ti2d+fp8")
    yield from ("ufp4+packed", "nvfp4+packed", "ue5m3+packed", "ti2d+fp8+packed")
    yield QWIX
