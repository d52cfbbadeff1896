"""Published policies: which layers of a model take which recipe.

Embeddings, norms, attention products, and the output head stay in high precision under
all of them; every other linear layer asks its policy for a recipe.
"""

import dataclasses
import fnmatch
from collections.abc import Callable
from typing import Protocol

from fp4jax import recipes
from fp4jax.recipes import Fprop, Recipe
from fp4jax.recipes import Policy as Policy
from fp4jax.recipes import Rule as Rule
from fp4jax.recipes import Schedule as Schedule


class HasLayers(Protocol):
    """What a policy needs to know of a model."""

    @property
    def num_layers(self) -> int:
        """Number of blocks, named "blocks/0" and so on in layer paths."""
        ...


def bf16(config: HasLayers) -> Policy:
    """Returns the policy that quantizes nothing."""
    del config
    return Policy(recipes.bf16())


def e2m1_ref(config: HasLayers) -> Policy:
    """Returns `recipes.e2m1_ref` in every block."""
    del config
    return Policy(recipes.e2m1_ref())


def ufp4(config: HasLayers) -> Policy:
    """Returns `recipes.ufp4` in every block."""
    del config
    return Policy(recipes.ufp4())


def nvfp4(config: HasLayers) -> Policy:
    """Returns `recipes.nvfp4`, but the last 15% of the blocks, at least one, in BF16.

    Args:
      config: a model of at least 2 layers.

    Raises:
      ValueError: a model of fewer layers, of which none would be quantized.
    """
    kept = max(1, round(0.15 * config.num_layers))
    return keep(Policy(recipes.nvfp4()), config, last=kept)


def int2(config: HasLayers) -> Policy:
    """Returns `recipes.int2` in every block: the control."""
    del config
    return Policy(recipes.int2())


def keep(policy: Policy, config: HasLayers, *, first: int = 0, last: int = 0) -> Policy:
    """Returns a policy with its first and last blocks in BF16.

    Args:
      policy: of the other blocks; rules that only concern blocks kept are left out.
      config: the model's.
      first: blocks kept at the start.
      last: blocks kept at the end.

    Raises:
      ValueError: a negative number, or no block is left to quantize.
    """
    blocks = config.num_layers
    if min(first, last) < 0 or first + last >= blocks:
        raise ValueError(
            "keep: first and last must not be negative and leave a block to quantize, "
            f"got first={first}, last={last} of num_layers={blocks}. Use a policy of "
            "one recipe to quantize all blocks."
        )
    kept = [f"blocks/{i}/*" for i in (*range(first), *range(blocks - last, blocks))]
    rules = (
        rule
        for rule in policy.rules
        if not any(fnmatch.fnmatchcase(rule.pattern, pattern) for pattern in kept)
    )
    bf16_rules = (Rule(pattern, recipes.bf16()) for pattern in kept)
    return dataclasses.replace(policy, rules=(*bf16_rules, *rules))


def bf16_forward(policy: Policy) -> Policy:
    """Returns a policy with fprop in BF16, dgrad and wgrad as they were.

    As the last phase of a `Schedule` it recovers much of the loss that fprop costs: in
    the NVFP4 report the last 18% of training do so.

    References: arXiv 2509.25149.
    """

    def forward(recipe: Recipe) -> Recipe:
        return dataclasses.replace(recipe, fprop=Fprop())

    rules = tuple(Rule(rule.pattern, forward(rule.recipe)) for rule in policy.rules)
    return Policy(forward(policy.default), rules)


PRESETS: dict[str, Callable[[HasLayers], Policy]] = {
    preset.__name__: preset for preset in (bf16, e2m1_ref, ufp4, nvfp4, int2)
}
