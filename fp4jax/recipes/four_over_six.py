"""Four over six: NVFP4 whose blocks may map their amax to 4 instead of 6."""

import dataclasses

from fp4jax.numerics import E4M3, Fresh, Quantizer, Scale
from fp4jax.recipes.nvfp4 import nvfp4
from fp4jax.recipes.recipe import Dgrad, Fprop, Recipe, Wgrad


def four_over_six() -> Recipe:
    """Returns `nvfp4` with the better of two scales for each block of x and w.

    | GEMM  | first operand                 | second operand               |
    |-------|-------------------------------|------------------------------|
    | fprop | x: 1x16, 4/6, nearest         | w: 16x16, 4/6, nearest       |
    | dgrad | dy: 1x16, stochastic          | w: 16x16, 4/6, nearest       |
    | wgrad | x: RHT 16, 1x16, 4/6, nearest | dy: RHT 16, 1x16, stochastic |

    The scale that maps the amax of a block to 6 or to 4, whichever has the smaller mean
    absolute error, 6 where they are equal. The largest block of the tensor is scaled to
    256 instead of 448, to leave room for the larger scale.

    References: arXiv 2512.02010; NVIDIA Transformer Engine's `nvfp4_use_4over6`.
    """
    base = nvfp4()
    scale = Scale(E4M3, pad=False, candidates=(6.0, 4.0))

    def better(quantizer: Quantizer | None) -> Quantizer:
        assert quantizer is not None
        return dataclasses.replace(quantizer, scale=scale, tensor_scale=Fresh(256.0))

    return Recipe(
        Fprop(x=better(base.fprop.x), w=better(base.fprop.w)),
        Dgrad(dy=base.dgrad.dy, w=better(base.dgrad.w)),
        Wgrad(x=better(base.wgrad.x), dy=base.wgrad.dy),
    )
