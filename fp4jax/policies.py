"""Published policies: which layers of a model take which recipe.

Embeddings, norms, attention products, and the output head stay in high precision under
all of them; every other linear layer asks its policy for a recipe.
"""

from collections.abc import Callable
from typing import Protocol

from fp4jax import recipes
from fp4jax.recipes import Policy as Policy
from fp4jax.recipes import Rule as Rule


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
    blocks = config.num_layers
    if blocks < 2:
        raise ValueError(
            "nvfp4: num_layers must be at least 2, or nothing is quantized, got "
            f"num_layers={blocks}. Use recipes.nvfp4() for a policy of one recipe."
        )
    kept = max(1, round(0.15 * blocks))
    last = range(blocks - kept, blocks)
    rules = tuple(Rule(f"blocks/{i}/*", recipes.bf16()) for i in last)
    return Policy(recipes.nvfp4(), rules)


def int2(config: HasLayers) -> Policy:
    """Returns `recipes.int2` in every block: the control."""
    del config
    return Policy(recipes.int2())


PRESETS: dict[str, Callable[[HasLayers], Policy]] = {
    preset.__name__: preset for preset in (bf16, e2m1_ref, ufp4, nvfp4, int2)
}
