"""Rounding and codes of planes: as `fp4jax.numerics` has them, or as a GPU is fastest.

Both give the same bits. What is fastest stands on float32 sums whose rounding is meant,
and on subnormals: compilers other than that of the kernels may simplify the first and
flush the second.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp4jax.numerics import exact, formats, rounding
from fp4jax.numerics.formats import Format


class Portable:
    """Those of `fp4jax.numerics`."""

    def nearest(self, t: jax.Array, grid: Format) -> jax.Array:
        """Returns `rounding.round_nearest`."""
        return rounding.round_nearest(t, grid)

    def stochastic(self, t: jax.Array, bits: jax.Array, grid: Format) -> jax.Array:
        """Returns `rounding.round_stochastic`."""
        return rounding.round_stochastic(t, bits, grid)

    def reciprocal(self, x: jax.Array) -> jax.Array:
        """Returns `exact.reciprocal`."""
        return exact.reciprocal(x)

    def code(self, value: jax.Array, grid: Format) -> jax.Array:
        """Returns `formats.encode` in uint32."""
        return lax.bitcast_convert_type(formats.signed_code(value, grid), jnp.uint32)


PORTABLE = Portable()


@dataclasses.dataclass(frozen=True)
class Nvidia(Portable):
    """The same in fewer instructions.

    Attributes:
      add_down: returns the sum of numbers >= 0, rounded toward zero.
      divide_into_one: as `reciprocal`.
    """

    add_down: Callable[[jax.Array, jax.Array | np.float32], jax.Array]
    divide_into_one: Callable[[jax.Array], jax.Array]

    def nearest(self, t: jax.Array, grid: Format) -> jax.Array:
        """Returns (t + 2^23 step) - 2^23 step: float32 has no room for less."""
        t = rounding.clamp(t, grid)
        most = rounding.binade(t, grid) * np.float32(2.0 ** (23 - grid.mantissa_bits))
        return (t + most) - most

    def stochastic(self, t: jax.Array, bits: jax.Array, grid: Format) -> jax.Array:
        """Adds random bits to the float32 pattern, below the mantissa of the grid.

        Before, what is below the lowest binade is brought into it, rounded down; a
        uniform grid into a binade in which its steps are the last of 7 bits.
        """
        t = rounding.clamp(t, grid)
        mantissa_bits, lowest = grid.mantissa_bits, np.float32(2.0**grid.emin)
        if grid.is_uniform:
            offset = np.float32(2.0 ** (grid.emin - mantissa_bits + 7))
            mantissa_bits = 7
        else:
            offset = jnp.where(t < lowest, lowest, jnp.float32(0))
        below = 23 - mantissa_bits
        pattern = lax.bitcast_convert_type(self.add_down(t, offset), jnp.uint32)
        pattern = (pattern + (bits << (below - 16))) & np.uint32(2**32 - 2**below)
        return lax.bitcast_convert_type(pattern, jnp.float32) - offset

    def reciprocal(self, x: jax.Array) -> jax.Array:
        """Returns what the device has an instruction for."""
        return self.divide_into_one(x)

    def code(self, value: jax.Array, grid: Format) -> jax.Array:
        """Scales the grid's subnormals to float32's, whose pattern holds the code."""
        scaled = value * np.float32(2.0 ** (-126 - grid.emin)) + np.float32(0)
        pattern = lax.bitcast_convert_type(scaled, jnp.uint32)
        sign, magnitude = np.uint32(1 << 31), pattern << (8 - grid.exponent_bits)
        signed = (magnitude & ~sign) | (pattern & sign)
        return signed >> (31 - grid.magnitude_bits)
