"""The E2M1 recipe that UFP4 is compared with."""

import dataclasses

from fp4jax.numerics import E2M1, FixedSigns, Hadamard, Quantizer, Scale, Stochastic
from fp4jax.recipes.recipe import Dgrad, Fprop, Recipe, Wgrad, two_level


def e2m1_ref(scale: Scale = Scale(), *, seed: int = 0) -> Recipe:
    """Returns E2M1 elements, one scale for 16, a Hadamard transform on wgrad only.

    | GEMM  | first operand      | second operand         |
    |-------|--------------------|------------------------|
    | fprop | x: nearest         | w: nearest             |
    | dgrad | dy: stochastic     | w: nearest             |
    | wgrad | x: RHT 16, nearest | dy: RHT 16, stochastic |

    Args:
      scale: block scale; published with float32. A scale of 3 mantissa bits is made
        two-level, its tensor scale from the tensor at hand.
      seed: of the sign vector, an integer in [0, 2^32).

    Returns:
      The recipe.

    Raises:
      ValueError: a seed out of range.
      TypeError: what is not a scale.
    References: arXiv 2606.20381, whose own baseline this is.
    """
    plain = two_level(Quantizer(E2M1, block=16, scale=scale))
    rotated = dataclasses.replace(plain, rotation=Hadamard(16, FixedSigns(seed)))
    sr = Stochastic()
    return Recipe(
        Fprop(x=plain, w=plain),
        Dgrad(dy=dataclasses.replace(plain, rounding=sr), w=plain),
        Wgrad(x=rotated, dy=dataclasses.replace(rotated, rounding=sr)),
    )
