"""Published policies: which layers of a model take which recipe.

They take the config of a model of `fp4jax.models`, whose embeddings, norms, attention
products, and output head stay in high precision under all of them; every other linear
layer asks its policy for a recipe. For any other model, write its rules in a `Policy`.
"""

import dataclasses
import fnmatch
from collections.abc import Callable, Sequence
from typing import Protocol, runtime_checkable

from fp4jax import recipes
from fp4jax.recipes import Fprop, Recipe
from fp4jax.recipes.policy import Policy as Policy
from fp4jax.recipes.policy import Rule as Rule
from fp4jax.recipes.policy import Schedule as Schedule


@runtime_checkable
class HasLayers(Protocol):
    """What a policy needs to know of a model."""

    @property
    def num_layers(self) -> int:
        """Number of blocks, named "blocks/0" and so on in layer paths."""
        ...

    @property
    def layer_paths(self) -> Sequence[str]:
        """The path of every layer that takes a recipe, in order."""
        ...


def _check_config(config: object, caller: str) -> None:
    if not isinstance(config, HasLayers):
        raise TypeError(
            f"{caller}: config must have num_layers and layer_paths, as those of "
            f"fp4jax.models do, got {type(config).__name__}. For a model of your own, "
            "write rules: Policy(recipe, (Rule(pattern, recipe),))."
        )


def _everywhere(recipe: Callable[[], Recipe]) -> Callable[[HasLayers], Policy]:
    """Returns the policy that has one recipe in every block."""

    def policy(config: HasLayers) -> Policy:
        del config
        return Policy(recipe())

    policy.__name__ = policy.__qualname__ = recipe.__name__
    policy.__doc__ = f"Returns `recipes.{recipe.__name__}` in every block."
    return policy


bf16 = _everywhere(recipes.bf16)
e2m1_ref = _everywhere(recipes.e2m1_ref)
ufp4 = _everywhere(recipes.ufp4)
mxfp4 = _everywhere(recipes.mxfp4)
mxfp4_tseng = _everywhere(recipes.mxfp4_tseng)
mxfp8 = _everywhere(recipes.mxfp8)
four_over_six = _everywhere(recipes.four_over_six)
quartet2 = _everywhere(recipes.quartet2)
int2 = _everywhere(recipes.int2)  # the control


def nvfp4(config: HasLayers) -> Policy:
    """Returns `recipes.nvfp4`, but the last 15% of the blocks, at least one, in BF16.

    Args:
      config: a model of at least 2 layers.

    Raises:
      ValueError: a model of fewer layers, of which none would be quantized.
      TypeError: what is no config.
    """
    _check_config(config, "nvfp4")
    kept = max(1, round(0.15 * config.num_layers))
    return keep(Policy(recipes.nvfp4()), config, last=kept)


def ue5m3(config: HasLayers) -> Policy:
    """Returns `recipes.ue5m3`, with another target for dy in the last four `mlp/down`.

    For wgrad it is 2048 there, not 448, which keeps small blocks of small gradients.
    Blocks without an MLP are passed over, and so are experts, of which the paper has
    none.

    Raises:
      TypeError: what is no config.

    References: arXiv 2609.02846.
    """
    _check_config(config, "ue5m3")
    last = [path for path in config.layer_paths if path.endswith("/mlp/down")][-4:]
    wider = recipes.ue5m3(wgrad_dy_target=2048.0)
    rules = tuple(Rule(path, wider) for path in last)
    return Policy(recipes.ue5m3(), rules)


def ti2d(config: HasLayers) -> Policy:
    """Returns `recipes.ti2d`, but `recipes.mxfp8` in projections to queries and keys.

    Raises:
      TypeError: what is no config.

    References: arXiv 2607.24953.
    """
    _check_config(config, "ti2d")
    projections = ("attention/query", "attention/key")
    if not any(path.endswith(projections) for path in config.layer_paths):
        return Policy(recipes.ti2d())
    rules = tuple(Rule(f"*/{name}", recipes.mxfp8()) for name in projections)
    return Policy(recipes.ti2d(), rules)


def keep(policy: Policy, config: HasLayers, *, first: int = 0, last: int = 0) -> Policy:
    """Returns a policy with its first and last blocks in BF16.

    Args:
      policy: of the other blocks; rules that only concern blocks kept are left out.
      config: the model's.
      first: blocks kept at the start.
      last: blocks kept at the end.

    Raises:
      ValueError: a negative number, or no block is left to quantize.
      TypeError: what is no config.
    """
    _check_config(config, "keep")
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
    """Returns a policy with fprop in BF16, and the quantizers of dgrad and wgrad.

    These quantize w and x themselves then, also where it was their values of fprop
    (`source="fprop"`, as in `quartet2`).

    As the last phase of a `Schedule` it recovers much of the loss that fprop costs: in
    the NVFP4 report the last 18% of training do so.

    References: arXiv 2509.25149.
    """

    def forward(recipe: Recipe) -> Recipe:
        return dataclasses.replace(recipe, fprop=Fprop(), source="original")

    return policy.map(forward)


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
