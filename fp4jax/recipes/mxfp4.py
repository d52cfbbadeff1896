"""MXFP4: E2M1 elements, a power of two for 32."""

import dataclasses

from fp4jax.numerics import (
    E2M1,
    E8M0,
    Hadamard,
    PerStepSigns,
    Quantizer,
    Scale,
    Stochastic,
)
from fp4jax.recipes.recipe import Dgrad, Fprop, Recipe, Wgrad


def mxfp4(scale: Scale = Scale(E8M0, "floor")) -> Recipe:
    """Returns E2M1 elements under one power of two for 32.

    | GEMM  | first operand        | second operand       |
    |-------|----------------------|----------------------|
    | fprop | x: 1x32, nearest     | w: 1x32, nearest     |
    | dgrad | dy: 1x32, stochastic | w: 1x32, nearest     |
    | wgrad | x: 1x32, nearest     | dy: 1x32, stochastic |

    Under the "floor" rule of OCP MX the elements above 6 clip, which biases also
    stochastic rounding; "truncation_free" does not clip.

    Args:
      scale: of format `E8M0`, and its rule.

    Raises:
      ValueError: a scale of another format.
      TypeError: what is not a scale.

    References: OCP Microscaling Formats v1.0.
    """
    nearest = Quantizer(E2M1, block=32, scale=scale)
    if scale.format != E8M0:
        raise ValueError(f"mxfp4: scale.format must be E8M0, got {scale.format}.")
    stochastic = dataclasses.replace(nearest, rounding=Stochastic())
    return Recipe(
        Fprop(x=nearest, w=nearest),
        Dgrad(dy=stochastic, w=nearest),
        Wgrad(x=nearest, dy=stochastic),
    )


def mxfp4_tseng() -> Recipe:
    """Returns MXFP4 in the backward pass alone, unbiased.

    | GEMM  | first operand                     | second operand                    |
    |-------|-----------------------------------|-----------------------------------|
    | fprop | x: BF16                           | w: BF16                           |
    | dgrad | dy: RHT 64, 3/4, 1x32, stochastic | w: RHT 64, 3/4, 1x32, stochastic  |
    | wgrad | x: RHT 64, 3/4, 1x32, stochastic  | dy: RHT 64, 3/4, 1x32, stochastic |

    Elements are multiplied by 3/4, so that none clips under the "floor" rule, and the
    products by (4/3)^2. Signs are drawn anew in every step.

    References: Tseng et al., arXiv 2502.20586.
    """
    operand = Quantizer(
        E2M1,
        block=32,
        scale=Scale(E8M0, "floor", prescale=0.75),
        rounding=Stochastic(),
        rotation=Hadamard(64, PerStepSigns()),
    )
    return Recipe(Fprop(), Dgrad(dy=operand, w=operand), Wgrad(x=operand, dy=operand))
