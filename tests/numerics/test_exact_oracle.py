"""Exact float32 arithmetic against numpy's IEEE division and exact powers of two."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp4jax.numerics import exact

divide = jax.jit(exact.divide)


def test_every_reciprocal_is_correctly_rounded():
    mantissas = np.arange(2**23, dtype=np.uint32)
    x = (mantissas | np.uint32(0x3F800000)).view(np.float32)
    np.testing.assert_array_equal(divide(1.0, jnp.asarray(x)), np.float32(1) / x)


@pytest.mark.parametrize("numerator", [6 * 448.0, 7 * 448.0, 6 * 2048.0, 4 * 448.0])
def test_constant_over_amax_is_correctly_rounded(numerator):
    rng = np.random.default_rng(0)
    exponent = rng.integers(-90, 128, 500_000)
    x = np.ldexp(rng.uniform(1, 2, exponent.size), exponent).astype(np.float32)
    x = x[np.isfinite(x)]
    np.testing.assert_array_equal(
        divide(numerator, jnp.asarray(x)), np.float32(numerator) / x
    )


def test_random_quotients_are_correctly_rounded():
    rng = np.random.default_rng(1)
    a, b = np.ldexp(
        rng.uniform(1, 2, (2, 1_000_000)), rng.integers(-62, 63, (2, 1_000_000))
    ).astype(np.float32)
    # Quotients within 2^-24 of 1 and of 2 are the hard cases of a correction.
    for numerator in (a, np.nextafter(b, np.float32(0)), 2 * np.nextafter(b, 2 * b)):
        quotient = divide(jnp.asarray(numerator), jnp.asarray(b))
        np.testing.assert_array_equal(quotient, numerator / b)


def test_powers_of_two():
    exponents = np.arange(-126, 128)
    powers = np.ldexp(np.float32(1), exponents)
    np.testing.assert_array_equal(exact.pow2(jnp.asarray(exponents)), powers)
    inverse = exact.inverse_pow2(jnp.asarray(powers[:-1]))
    np.testing.assert_array_equal(inverse, np.float32(1) / powers[:-1])
    for x in (powers, np.nextafter(2 * powers[:-1], np.float32(0)), 1.37 * powers):
        x = x.astype(np.float32)
        floor = np.ldexp(np.float32(1), np.frexp(x)[1] - 1)
        np.testing.assert_array_equal(exact.floor_pow2(jnp.asarray(x)), floor)
