"""A two-bit recipe: the control that every 4-bit recipe must plainly beat."""

import dataclasses

from fp4jax.numerics import INT2, Quantizer, Stochastic
from fp4jax.recipes.recipe import Dgrad, Fprop, Recipe, Wgrad


def int2() -> Recipe:
    """Returns elements of {-1, 0, 1} times a float32 scale for 16, SR on dy.

    Not a recipe to train with: a comparison in which it does not lose plainly is one
    whose quantization did nothing.
    """
    nearest = Quantizer(INT2, block=16)
    stochastic = dataclasses.replace(nearest, rounding=Stochastic())
    return Recipe(
        Fprop(x=nearest, w=nearest),
        Dgrad(dy=stochastic, w=nearest),
        Wgrad(x=nearest, dy=stochastic),
    )
