"""Where square blocks lie in the range of E4M3, and by what they may be multiplied."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp

from fp4jax.kernels import fp8 as kernels
from fp4jax.kernels.quantize.backends import Mosaic
from fp4jax.numerics import Format, Quantizer, exact, scaling
from fp4jax.ops import fp8

# The largest scale is brought to the top of E4M3 by a float32 power of two.
_LOWEST_TOP = -115


class Levels(NamedTuple):
    """Where the square blocks of a matrix lie between the smallest and largest float.

    Attributes:
      exponent: int32 [r, c], of the power of two that is a block's scale.
      is_zero: bool [r, c], whether all of it is zero.
      is_finite: bool [], whether everything is.
    """

    exponent: jax.Array
    is_zero: jax.Array
    is_finite: jax.Array

    def top(self, along: int) -> jax.Array:
        """Returns the largest exponent along an axis, which stays."""
        exponent = jnp.where(self.is_zero, fp8.LOWEST, self.exponent)
        return jnp.maximum(jnp.max(exponent, along, keepdims=True), _LOWEST_TOP)

    def room(self, grid: Format) -> tuple[jax.Array, jax.Array]:
        """Returns by which powers of two, from and to, all of it may be multiplied."""
        least = jnp.min(jnp.where(self.is_zero, -fp8.LOWEST, self.exponent))
        shift = fp8.shift(grid)
        return shift - fp8.window(grid) - least, shift - jnp.max(self.top(0))

    def fit(self, along: int, grid: Format) -> jax.Array:
        """Returns whether all blocks are within reach of the largest along an axis."""
        is_near = self.top(along) - self.exponent <= fp8.window(grid)
        return jnp.all(self.is_zero | is_near) & self.is_finite


def levels(backend: Mosaic, x: jax.Array, quantizer: Quantizer) -> Levels:
    """Returns those of a matrix [r, c] and a quantizer of squares."""
    amax = kernels.amax(backend, x, quantizer.block_size)
    scale, _ = scaling.block_scale(amax, quantizer.scale, quantizer.grid)
    return of_scales(scale, amax == 0)


def of_scales(scale: jax.Array, is_zero: jax.Array) -> Levels:
    """Returns those of blocks that have scales, powers of two, and may be zero."""
    return Levels(exact.exponent_of(scale), is_zero, jnp.all(jnp.isfinite(scale)))


def balance(
    a: Levels, b: Levels, grids: Sequence[Format]
) -> tuple[jax.Array, jax.Array]:
    """Returns the power of two for a, whose inverse is for b, and whether both fit so.

    What they are multiplied by then cancels in products.

    Args:
      a: of a matrix.
      b: of what it is multiplied by.
      grids: of the elements of both.
    """
    (low, high), (low_b, high_b) = (
        x.room(grid) for x, grid in zip((a, b), grids, strict=True)
    )
    low, high = jnp.maximum(low, -high_b), jnp.minimum(high, -low_b)
    return jnp.clip(0, low, high), low <= high
