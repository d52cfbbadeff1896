"""MXFP8: E4M3 elements, a power of two for 32."""

import dataclasses

from fp4jax.numerics import E4M3, E5M2, E8M0, Format, Quantizer, Scale
from fp4jax.recipes.recipe import Dgrad, Fprop, Recipe, Wgrad


def mxfp8(dy: Format = E4M3) -> Recipe:
    """Returns 8-bit elements under one power of two for 32, rounded to nearest.

    | GEMM  | first operand | second operand |
    |-------|---------------|----------------|
    | fprop | x: 1x32       | w: 1x32        |
    | dgrad | dy: 1x32      | w: 1x32        |
    | wgrad | x: 1x32       | dy: 1x32       |

    Args:
      dy: grid of the output gradient, `E4M3` or `E5M2`; E5M2 has been reported to
        diverge.

    Raises:
      ValueError: another grid.

    References: OCP Microscaling Formats v1.0; scales "truncation_free" as in NVIDIA's
      recipe.
    """
    if dy not in (E4M3, E5M2):
        raise ValueError(f"mxfp8: dy must be E4M3 or E5M2, got dy={dy!r}.")
    operand = Quantizer(E4M3, block=32, scale=Scale(E8M0, "truncation_free"))
    gradient = dataclasses.replace(operand, grid=dy)
    return Recipe(
        Fprop(x=operand, w=operand),
        Dgrad(dy=gradient, w=operand),
        Wgrad(x=operand, dy=gradient),
    )
