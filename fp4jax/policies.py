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


def mxfp4(config: HasLayers) -> Policy:
    """Returns `recipes.mxfp4` in every block."""
    del config
    return Policy(recipes.mxfp4())


def mxfp4_tseng(config: HasLayers) -> Policy:
    """Returns `recipes.mxfp4_tseng` in every block."""
    del config
    return Policy(recipes.mxfp4_tseng())


def mxfp8(config: HasLayers) -> Policy:
    """Returns `recipes.mxfp8` in every block."""
    del config
    return Policy(recipes.mxfp8())


def ue5m3(config: HasLayers) -> Policy:
    """Returns `recipes.ue5m3`, with another target for dy in the last four `mlp/down`.

    For wgrad it is 2048 there, not 448, which keeps small blocks of small gradients.

    References: arXiv 2609.02846.
    """
    last = range(max(0, config.num_layers - 4), config.num_layers)
    wider = recipes.ue5m3(wgrad_dy_target=2048.0)
    rules = tuple(Rule(f"blocks/{i}/mlp/down", wider) for i in last)
    return Policy(recipes.ue5m3(), rules)


def ti2d(config: HasLayers) -> Policy:
    """Returns `recipes.ti2d`, but `recipes.mxfp8` in projections to queries and keys.

    References: arXiv 2607.24953.
    """
    del config
    projections = ("*/attention/query", "*/attention/key")
    rules = tuple(Rule(pattern, recipes.mxfp8()) for pattern in projections)
    return Policy(recipes.ti2d(), rules)


def four_over_six(config: HasLayers) -> Policy:
    """Returns `recipes.four_over_six` in every block."""
    del config
    return Policy(recipes.four_over_six())


def quartet2(config: HasLayers) -> Policy:
    """Returns `recipes.quartet2` in every block."""
    del config
    return Policy(recipes.quartet2())


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
        return dataclasses.replace(recipe, fprop=Fprop(), source="original")

    rules = tuple(Rule(rule.pattern, forward(rule.recipe)) for rule in policy.rules)
    return Policy(forward(policy.default), rules)


PRESETS: dict[str, Callable[[HasLayers], Policy]] = {
    preset.__name__: preset
    for preset in (
        bf16,
        e2m1_ref,
        ufp4,
        nvfp4,
        mxfp4,
        mxfp4_tseng,
        mxfp8,
        ue5m3,
        ti2d,
        four_over_six,
        quartet2,
        int2,
    )
}
