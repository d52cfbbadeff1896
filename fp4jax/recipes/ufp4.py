"""UFP4: a uniform 4-bit grid and a Hadamard transform on all three GEMMs."""

import dataclasses

from fp4jax.numerics import (
    UNIFORM,
    FixedSigns,
    Hadamard,
    Quantizer,
    Scale,
    Stochastic,
    checks,
)
from fp4jax.recipes.recipe import Dgrad, Fprop, Recipe, Wgrad, two_level


def ufp4(scale: Scale = Scale(), *, seed: int = 0) -> Recipe:
    """Returns the uniform recipe: E1M2 (INT4) elements, one scale for 16.

    | GEMM  | first operand          | second operand         |
    |-------|------------------------|------------------------|
    | fprop | x: RHT 16, nearest     | w: RHT 16, nearest     |
    | dgrad | dy: RHT 16, stochastic | w: RHT 16, nearest     |
    | wgrad | x: RHT 16, nearest     | dy: RHT 16, stochastic |

    The uniform grid has no shrinking interior bins, and a rotation makes blocks
    near-Gaussian, on which it loses less than E2M1. The publication does not say how
    signs are drawn; here each GEMM has one fixed vector.

    Args:
      scale: block scale; published with float32. A scale of 3 mantissa bits is made
        two-level, its tensor scale from the tensor at hand.
      seed: of the sign vectors, an integer in [0, 2^32 - 2): fprop takes it, dgrad and
        wgrad the next two.

    Returns:
      The recipe.

    Raises:
      ValueError: a seed out of range.
      TypeError: what is not a scale.
    References: arXiv 2606.20381.
    """
    if not checks.is_integer(seed) or not 0 <= seed < 2**32 - 2:
        raise ValueError(
            f"ufp4: seed must be an integer in [0, 2^32 - 2), got seed={seed!r}."
        )
    quantizer = two_level(Quantizer(UNIFORM, block=16, scale=scale))
    fprop, dgrad, wgrad = (
        dataclasses.replace(quantizer, rotation=Hadamard(16, FixedSigns(seed + gemm)))
        for gemm in range(3)
    )
    sr = Stochastic()
    return Recipe(
        Fprop(x=fprop, w=fprop),
        Dgrad(dy=dataclasses.replace(dgrad, rounding=sr), w=dgrad),
        Wgrad(x=wgrad, dy=dataclasses.replace(wgrad, rounding=sr)),
    )
