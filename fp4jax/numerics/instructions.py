"""Roundings, reciprocals and codes as any compiler computes them.

A kernel for a device may have others that give the same bits.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
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

    def words(
        self,
        values: Sequence[jax.Array],
        grid: Format,
        width: int,
        room: int,
        unrounded: Sequence[jax.Array] | None = None,
    ) -> list[jax.Array]:
        """Returns uint32 of so many codes each, the first in the lowest bits.

        Args:
          values: signed members of the grid.
          grid: the grid.
          width: bits of a code.
          room: codes of a word.
          unrounded: numbers to which the values are the nearest; None where they are
            not, or where that is not known.
        """
        del unrounded
        words, codes = [], [self.code(value, grid) for value in values]
        for first in range(0, len(codes), room):
            *lower, word = codes[first : first + room]
            for code in reversed(lower):
                word = (word << width) | code
            words.append(word)
        return words

    def code(self, value: jax.Array, grid: Format) -> jax.Array:
        """Returns `formats.encode` in uint32."""
        return lax.bitcast_convert_type(formats.signed_code(value, grid), jnp.uint32)


PORTABLE = Portable()
