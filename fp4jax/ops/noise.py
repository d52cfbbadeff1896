"""What the random numbers of a call depend on: its key, and where its tokens stand.

A batch that is processed in n parts of m tokens draws what it would draw as a whole:
the bits of token t of part i are those of row i m + t. Tokens that are grouped in tiles
draw what they would draw at the positions that they come from.
"""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fp4jax.numerics import Site
from fp4jax.ops.arguments import check_integer
from fp4jax.recipes import Recipe

_OF_TOKENS = tuple(site for site in Site if not site.is_w)


class Noise(NamedTuple):
    """The source of a call's random numbers.

    Attributes:
      key: of the call, or None.
      first_token: uint32 [], the index of its first token in a larger batch, or None.
      positions: uint32 [t, a], the index of every token, where x is [t, a, k], or None.
    """

    key: jax.Array | None = None
    first_token: jax.Array | None = None
    positions: jax.Array | None = None

    @classmethod
    def of(cls, key: Any, microbatch: Any, *, tokens: int) -> "Noise":
        """Returns that of microbatch i, which begins at token i tokens."""
        if microbatch is None:
            return cls(key)
        return cls(key, jnp.asarray(microbatch).astype(jnp.uint32) * jnp.uint32(tokens))

    def start(self, site: Site) -> tuple[jax.Array, jax.Array] | None:
        """Returns row and column, in [free, contraction], where an operand begins."""
        if self.first_token is None or site.is_w:
            return None
        start = self.first_token, jnp.uint32(0)
        return start[::-1] if site.is_wgrad else start

    def tokens(self, site: Site) -> jax.Array | None:
        """Returns the positions of the tokens of an operand that has any."""
        return None if site.is_w else self.positions


def token_multiple(recipe: Recipe) -> int:
    """Returns of how many tokens whole blocks and rotations of every operand are."""
    return math.lcm(*(_token_multiple(recipe, site) for site in _OF_TOKENS))


def check_microbatch(
    microbatch: Any, recipe: Recipe, *, tokens: int, batch: int, caller: str
) -> None:
    """Raises ValueError where a part would not be quantized as the whole batch is.

    Args:
      microbatch: the argument of `caller`.
      recipe: of the call.
      tokens: of the call, in each element of its batch dimensions.
      batch: number of batch dimensions.
      caller: the function whose arguments they are.
    """
    if microbatch is None:
        return
    check_integer(microbatch, caller, name="microbatch")
    if batch and recipe.draws(*_OF_TOKENS):
        raise ValueError(
            f"{caller}: microbatch must be None where a recipe draws and there are "
            f"batch dimensions, got {batch} of them: whether these or the free ones "
            "were divided does not show."
        )
    multiple = token_multiple(recipe)
    if not batch and tokens % multiple:
        raise ValueError(
            f"{caller}: the tokens of a microbatch must be a multiple of {multiple}, "
            "or blocks and rotations along them differ from those of the whole batch, "
            f"got {tokens}. Take fewer microbatches or longer rows."
        )


def _token_multiple(recipe: Recipe, site: Site) -> int:
    quantizer = recipe.sites[site]
    if quantizer is None or not (site.is_wgrad or quantizer.is_square):
        return 1
    return quantizer.multiple
