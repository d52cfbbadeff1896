"""Transposition-invariant FP4: square blocks, one scale forward and backward."""

import dataclasses

from fp4jax.numerics import E2M1, E8M0, Quantizer, Scale, Stochastic
from fp4jax.recipes.recipe import Dgrad, Fprop, Recipe, Wgrad, two_level


def ti2d(
    *,
    block: int = 32,
    scale: Scale = Scale(E8M0, "truncation_free"),
    sr_all: bool = False,
) -> Recipe:
    """Returns E2M1 elements in squares under a power of two that does not truncate.

    | GEMM  | first operand       | second operand    |
    |-------|---------------------|-------------------|
    | fprop | x: BxB, nearest     | w: BxB, nearest   |
    | dgrad | dy: BxB, stochastic | w: BxB, nearest   |
    | wgrad | x: BxB, nearest     | dy: that of dgrad |

    A square keeps its scale when the tensor is transposed, so that every GEMM sees the
    same x, w and dy. In a model, the query and key projections take `mxfp8`:
    `policies.ti2d`. Which operands the publication rounds stochastically is not said.

    Args:
      block: side B of a square.
      scale: block scale; published with a power of two, rounded up. A scale of 3
        mantissa bits is made two-level, its tensor scale from the tensor at hand.
      sr_all: whether x and w are rounded stochastically too; each GEMM then draws for
        itself.

    References: arXiv 2607.24953.
    """
    nearest = two_level(Quantizer(E2M1, block=(block, block), scale=scale))
    stochastic = dataclasses.replace(nearest, rounding=Stochastic())
    operand = stochastic if sr_all else nearest
    return Recipe(
        Fprop(x=operand, w=operand),
        Dgrad(dy=stochastic, w=operand),
        Wgrad(x=operand, dy=stochastic),
        share_dy=True,
    )
