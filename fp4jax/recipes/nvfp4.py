"""NVFP4: E2M1 elements under two levels of scales."""

import dataclasses

from fp4jax.numerics import (
    E2M1,
    E4M3,
    NVFP4_SIGNS,
    Fresh,
    Hadamard,
    Quantizer,
    Scale,
    Stochastic,
)
from fp4jax.recipes.recipe import Dgrad, Fprop, Recipe, Wgrad


def nvfp4() -> Recipe:
    """Returns E2M1 elements, E4M3 block scales, a float32 tensor scale.

    | GEMM  | first operand            | second operand               |
    |-------|--------------------------|------------------------------|
    | fprop | x: 1x16, nearest         | w: 16x16, nearest            |
    | dgrad | dy: 1x16, stochastic     | w: 16x16, nearest            |
    | wgrad | x: RHT 16, 1x16, nearest | dy: RHT 16, 1x16, stochastic |

    Square weight blocks give fprop and dgrad the same weights. As published, the scales
    of stochastically rounded operands are not padded. The last blocks of a model stay
    in high precision: `policies.nvfp4`.

    References: arXiv 2509.25149; NVIDIA Transformer Engine's NVFP4BlockScaling.
    """
    scale = Scale(E4M3, pad=False)
    row = Quantizer(E2M1, block=16, scale=scale, tensor_scale=Fresh())
    square = dataclasses.replace(row, block=(16, 16))
    rotated = dataclasses.replace(row, rotation=Hadamard(16, NVFP4_SIGNS))
    sr = Stochastic()
    return Recipe(
        Fprop(x=row, w=square),
        Dgrad(dy=dataclasses.replace(row, rounding=sr), w=square),
        Wgrad(x=rotated, dy=dataclasses.replace(rotated, rounding=sr)),
    )
