"""Roundings, reciprocals and codes in a GPU's fewest instructions.

They stand on float32 sums whose rounding is meant, and on subnormals: compilers other
than that of the kernels may simplify the first and flush the second.
"""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp4jax.numerics import rounding
from fp4jax.numerics.formats import Format
from fp4jax.numerics.instructions import Portable


@dataclasses.dataclass(frozen=True)
class Nvidia(Portable):
    """The same as `Portable` in fewer instructions.

    Attributes:
      add_down: returns the sum of numbers >= 0, rounded toward zero.
      divide_into_one: as `reciprocal`.
      high_halves: returns uint32 of the upper 16 bits of two, the first's above.
    """

    add_down: Callable[[jax.Array, jax.Array | np.float32], jax.Array]
    divide_into_one: Callable[[jax.Array], jax.Array]
    high_halves: Callable[[jax.Array, jax.Array], jax.Array]

    def nearest(self, t: jax.Array, grid: Format) -> jax.Array:
        """Returns (t + 2^23 step) - 2^23 step: float32 has no room for less."""
        total, most = _counted(t, grid)
        return total - most

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

    def words(
        self,
        values: Sequence[jax.Array],
        grid: Format,
        width: int,
        room: int,
        unrounded: Sequence[jax.Array] | None = None,
    ) -> list[jax.Array]:
        """Brings codes of 4 bits together before their signs to their magnitudes."""
        if room % 8 or grid.magnitude_bits != 3:
            return super().words(values, grid, width, room)
        if unrounded is not None:
            eights = (unrounded[i : i + 8] for i in range(0, len(unrounded), 8))
            return [_nearest_nibbles(eight, grid) for eight in eights]
        patterns = [self._pattern(value, grid) for value in values]
        eights = (patterns[i : i + 8] for i in range(0, len(patterns), 8))
        low = 23 - grid.mantissa_bits
        return [_nibbles(eight, low, self.high_halves) for eight in eights]

    def code(self, value: jax.Array, grid: Format) -> jax.Array:
        """Takes the code out of a float32 pattern that holds it."""
        pattern = self._pattern(value, grid)
        sign, magnitude = np.uint32(1 << 31), pattern << (8 - grid.exponent_bits)
        signed = (magnitude & ~sign) | (pattern & sign)
        return signed >> (31 - grid.magnitude_bits)

    def _pattern(self, value: jax.Array, grid: Format) -> jax.Array:
        """Scales the grid's subnormals to float32's: uint32, the code from bit 23 - M.

        The sign is bit 31; zero has none.
        """
        scaled = value * np.float32(2.0 ** (-126 - grid.emin)) + np.float32(0)
        return lax.bitcast_convert_type(scaled, jnp.uint32)


def _counted(t: jax.Array, grid: Format) -> tuple[jax.Array, jax.Array | np.float32]:
    """Returns a magnitude plus 2^23 steps, whose last bits count steps, and these."""
    t = rounding.clamp(t, grid)
    most = rounding.binade(t, grid) * np.float32(2.0 ** (23 - grid.mantissa_bits))
    return t + most, most


def _nearest_nibbles(ts: Sequence[jax.Array], grid: Format) -> jax.Array:
    """Returns a word of the codes nearest to eight numbers.

        code = steps + (exponent - lowest exponent) 2^M

    Sums carry what is above the codes, and constants, until four codes are together.
    """
    last, halves = 23 - grid.mantissa_bits, []
    lowest = 0 if grid.is_uniform else (grid.emin + last + 127) << grid.mantissa_bits
    for first in (0, 4):
        codes = np.uint32(-lowest * 0x1111 % 2**32)
        for i, t in enumerate(ts[first : first + 4]):
            total, _ = _counted(jnp.abs(t), grid)
            code = lax.bitcast_convert_type(total, jnp.uint32)
            code = code if grid.is_uniform else code + (code >> last)
            codes = codes + (code << (4 * i))
        halves.append(codes)
    magnitudes = (halves[0] & np.uint32(0xFFFF)) | (halves[1] << 16)
    signs = np.uint32(0)
    for t in reversed(ts):
        signs = (signs << 4) | (lax.bitcast_convert_type(t, jnp.uint32) >> 28)
    highest_of_nonzero = magnitudes + np.uint32(0x77777777)
    return magnitudes | (signs & highest_of_nonzero & np.uint32(0x88888888))


def _nibbles(
    patterns: Sequence[jax.Array],
    low: int,
    high_halves: Callable[[jax.Array, jax.Array], jax.Array],
) -> jax.Array:
    """Returns a word of eight codes, given patterns with a sign and three bits each.

    Args:
      patterns: uint32, sign at bit 31, magnitude from bit `low`, nothing else.
      low: 21 or 22.
      high_halves: as of `Nvidia`.
    """

    def four(a: jax.Array, b: jax.Array, c: jax.Array, d: jax.Array) -> jax.Array:
        """Returns codes c and a in the third byte, d and b in the first."""
        together = high_halves(a, b) | (high_halves(c, d) >> 4)
        magnitudes = np.uint32(sum(7 << (low - i) for i in (0, 4, 16, 20)))
        signs = together >> (28 - low)
        return ((together & magnitudes) | (signs & ~magnitudes)) >> (low - 20)

    p, bytes_0_2 = patterns, np.uint32(0x00FF00FF)
    first, second = four(p[5], p[1], p[4], p[0]), four(p[7], p[3], p[6], p[2])
    return (first & bytes_0_2) | ((second << 8) & ~bytes_0_2)
