"""Float32 arithmetic that gives the same bits on every backend, traced or not.

Compilers turn divisions into multiplications by an approximate reciprocal, contract a
product and a sum, and drop narrowing casts. One unit in the last place of a scale flips
codes, so scales are computed with the functions of this module, which are built from
exact steps only.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

MAGNITUDE = 0x7FFFFFFF
EXPONENT = 0x7F800000
_MANTISSA = 0x007FFFFF
_ONE = 0x3F800000
_SIGN = -0x80000000


def bits_of(x: jax.Array) -> jax.Array:
    """Returns the int32 pattern of a float32 array."""
    return lax.bitcast_convert_type(x, jnp.int32)


def constant_bits(x: float) -> int:
    """Returns the int32 pattern of a number."""
    return int(np.float32(x).view(np.int32))


def magnitude_bits_of(x: jax.Array) -> jax.Array:
    """Returns the int32 pattern of |x|, also of a NaN."""
    return bits_of(x) & MAGNITUDE


def float_of(bits: jax.Array) -> jax.Array:
    """Returns the float32 array of an int32 pattern."""
    return lax.bitcast_convert_type(bits, jnp.float32)


def integer_of(x: jax.Array) -> jax.Array:
    """Returns float32 integers in [0, 2^23) as uint32.

    By their place in a sum: what converts types also looks for values out of range.
    """
    bits = lax.bitcast_convert_type(x + np.float32(2.0**23), jnp.uint32)
    return bits - np.uint32(constant_bits(2.0**23))


def floor_pow2(x: jax.Array) -> jax.Array:
    """Returns 2^floor(log2 x) of a normal float32 > 0; 0 of zero and of subnormals."""
    return float_of(bits_of(x) & EXPONENT)


def inverse_pow2(p: jax.Array) -> jax.Array:
    """Returns 1/p of a float32 power of two in [2^-126, 2^126]."""
    return float_of(2 * _ONE - bits_of(p))


def with_sign_of(magnitude: jax.Array, x: jax.Array) -> jax.Array:
    """Returns float32 magnitudes with the signs of x, of zeros as well."""
    return float_of(bits_of(magnitude) | (bits_of(x) & _SIGN))


def pow2(exponent: jax.Array) -> jax.Array:
    """Returns 2^exponent of an int32 array in [-126, 127]."""
    return float_of((exponent + 127) << 23)


def exponent_of(x: jax.Array) -> jax.Array:
    """Returns floor(log2 x) of a normal float32 > 0, int32."""
    return (bits_of(x) >> 23) - 127


def cast(x: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """Casts to float32 or bfloat16, sure to round.

    A compiler that keeps excess precision drops a cast to bfloat16 and back.
    """
    if dtype == jnp.bfloat16 and x.dtype != jnp.bfloat16:
        # From float32: bfloat16 holds more bits of float16's subnormals.
        x = lax.reduce_precision(x.astype(jnp.float32), 8, 7)
    return x.astype(dtype)


def divide(a: jax.Array | float, b: jax.Array) -> jax.Array:
    """Divides positive normal float32, with a normal quotient, correctly rounded.

    q -> the one of q, q +- ulp with the smallest |a - q b|, twice

    A device's own quotient may be off by two units in the last place. The residual is
    exact: every partial product of 12-bit halves fits a float32, and so does each
    difference.
    """
    if not isinstance(a, jax.Array):
        a = jnp.full_like(b, a)
    # On mantissas in [1, 2) nothing over- or underflows.
    a_bits, b_bits = bits_of(a), bits_of(b)
    m_a = float_of((a_bits & _MANTISSA) | _ONE)
    m_b = float_of((b_bits & _MANTISSA) | _ONE)
    q = m_a / m_b
    for _ in range(2):
        r = _residual(m_a, q, m_b)
        neighbor = float_of(bits_of(q) + jnp.where(r > 0, 1, -1))
        closer = jnp.abs(_residual(m_a, neighbor, m_b)) < jnp.abs(r)
        q = jnp.where(closer, neighbor, q)
    exponent = (a_bits & EXPONENT) - (b_bits & EXPONENT)
    # Not a product with 2^e, which overflows before the quotient does.
    quotient = float_of(bits_of(q) + exponent)
    return jnp.where(jnp.isnan(a) | jnp.isnan(b), jnp.nan, quotient)


def reciprocal(x: jax.Array) -> jax.Array:
    """Returns 1/x of positive normal float32, correctly rounded, where it is normal."""
    return divide(1.0, x)


def _residual(a: jax.Array, q: jax.Array, b: jax.Array) -> jax.Array:
    q_high, q_low = _halves(q)
    b_high, b_low = _halves(b)
    r = a - q_high * b_high
    return ((r - q_high * b_low) - q_low * b_high) - q_low * b_low


def _halves(x: jax.Array) -> tuple[jax.Array, jax.Array]:
    high = float_of(bits_of(x) & ~0xFFF)
    return high, x - high
