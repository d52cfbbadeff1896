"""Packed codes and their scales to bfloat16, two in a word, by integer arithmetic.

The magnitude of a code, its exponent field e and mantissa m in M bits, is read off a
float of the same fields, which has a leading one where the lowest binade has none:

    h = 2^(emin - 1 + e) (1 + m 2^-M),   magnitude = min(h, 2 h - 2^emin)

Every step is exact in bfloat16, so that the product with a scale of one byte is exact
too, and one with a float32 scale is rounded once: `fp4jax.numerics` decodes to the same
bits. The functions take words of any shape, in kernels and out of them.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp4jax.numerics.formats import Format

Pairs = Callable[[jax.Array], jax.Array]  # words to the bfloat16 in them

_TWICE = 0x10001  # what puts a half of a word into both
_NAN = np.uint32(0x7FC00000)


def elements(
    codes: jax.Array, scales: jax.Array | np.uint32, grid: Format, pairs: Pairs
) -> jax.Array:
    """Returns what bytes of two codes stand for, times their scales.

    Args:
      codes: uint32, a byte of two 4-bit codes each, the first in the low half.
      scales: of `scale_words` or `one`.
      grid: of the codes.
      pairs: maps [r, c] words to bfloat16 [r, 2 c], from the low half up.
    """
    # A code for each half of the word, where bfloat16 has its fields, and its sign.
    spread, bits = 1 << 12 | 1, grid.magnitude_bits
    shift = 7 - grid.mantissa_bits
    fields = codes * np.uint32(spread << shift) & _both((1 << bits) - 1 << shift)
    signs = codes * np.uint32(spread << 15 - bits) & _both(0x8000)
    h = pairs(fields | _both(_exponent(grid) - _excess(grid) << 7))
    lowest = np.asarray(2.0 ** (grid.emin - _excess(grid)), h.dtype)
    return jnp.minimum(h, h * np.asarray(2, h.dtype) - lowest) * pairs(signs ^ scales)


def scale_words(codes: jax.Array, fmt: Format, grid: Format) -> jax.Array:
    """Returns words that hold a scale twice in bfloat16, as `elements` takes it.

    Args:
      codes: uint32 codes of `fmt`; those of E8M0 are 0 or in [2^-125, 2^125].
      fmt: a format of one byte.
      grid: of what they scale.
    """
    assert fmt.nan_code is not None
    first = np.uint32((_exponent(fmt) + _excess(grid) << 23) % 2**32)
    bits = codes * np.uint32(1 << 23 - fmt.mantissa_bits) + first
    if fmt.mantissa_bits:
        h = lax.bitcast_convert_type(bits, jnp.float32)
        lowest = np.float32(2.0 ** (fmt.emin + _excess(grid)))
        bits = _bits(jnp.minimum(h, h * np.float32(2) - lowest))
    else:
        bits = jnp.where(codes == 0, np.uint32(0), bits)
    bits = jnp.where(codes == np.uint32(fmt.nan_code), _NAN, bits)
    return bits | bits >> 16


def one(grid: Format) -> np.uint32:
    """Returns the word of `scale_words` for a scale of 1."""
    return _both(127 + _excess(grid) << 7)


def _exponent(fmt: Format) -> int:
    """Returns the exponent field of h for code 0."""
    return 126 + fmt.emin


def _excess(grid: Format) -> int:
    """Returns by what h is shifted, so that the fields of a code need no carry."""
    return (_exponent(grid) + 1) % (1 << grid.exponent_bits) - 1


def _both(half: int) -> np.uint32:
    return np.uint32(half * _TWICE)


def _bits(x) -> jax.Array:
    return lax.bitcast_convert_type(x, jnp.uint32)
