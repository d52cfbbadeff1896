"""UE5M3: block scales of a wide range, under a tensor scale that is held."""

import dataclasses

from fp4jax.numerics import E2M1, UE5M3, Held, Quantizer, Scale, Stochastic
from fp4jax.recipes.recipe import Dgrad, Fprop, Recipe, Wgrad


def ue5m3(
    *,
    every: int = 50,
    target: float = 448.0,
    wgrad_dy_target: float | None = None,
    scale: Scale = Scale(UE5M3, pad=False),
) -> Recipe:
    """Returns E2M1 elements, UE5M3 block scales, a tensor scale held for some steps.

    | GEMM  | first operand        | second operand       |
    |-------|----------------------|----------------------|
    | fprop | x: 1x16, nearest     | w: 16x16, nearest    |
    | dgrad | dy: 1x16, stochastic | w: 16x16, nearest    |
    | wgrad | x: 1x16, nearest     | dy: 1x16, stochastic |

    Five exponent bits leave room above the target for a tensor that grows while its
    amax is held, 137 times at 448. There is no rotation. As published, scales of
    stochastically rounded operands are not padded. Rounding draws 16 bits, in the
    publication 8.

    Args:
      every: steps for which the amax of a tensor is held.
      target: the block scale of the tensor's largest block.
      wgrad_dy_target: that of dy in wgrad, None for `target`; the publication takes
        2048 in the last four down projections.
      scale: the block scale, of 3 mantissa bits.

    References: arXiv 2609.02846.
    """
    row = Quantizer(
        E2M1, block=16, scale=scale, tensor_scale=Held(every=every, target=target)
    )
    square = dataclasses.replace(row, block=(16, 16))
    dy = dataclasses.replace(row, rounding=Stochastic())
    wgrad_dy = dy
    if wgrad_dy_target is not None:
        wgrad_dy = dataclasses.replace(
            dy, tensor_scale=Held(every=every, target=wgrad_dy_target)
        )
    return Recipe(
        Fprop(x=row, w=square), Dgrad(dy=dy, w=square), Wgrad(x=row, dy=wgrad_dy)
    )
