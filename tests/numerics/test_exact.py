"""Casts that round for sure, bit patterns, and division at its edges."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from fp4jax.numerics import exact

cast = jax.jit(exact.cast, static_argnums=1)
divide = jax.jit(exact.divide)


def test_cast_of_every_float16_equals_ml_dtypes():
    x = np.arange(2**16, dtype=np.uint16).view(np.float16)
    x = x[np.isfinite(x)]
    y = cast(jnp.asarray(x), jnp.bfloat16)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(y, x.astype(np.float32).astype(ml_dtypes.bfloat16))


def test_cast_there_and_back_rounds():
    x = np.random.default_rng(0).standard_normal(1000, np.float32)
    there_and_back = jax.jit(
        lambda x: exact.cast(exact.cast(x, jnp.bfloat16), jnp.float32)
    )
    expected = x.astype(ml_dtypes.bfloat16).astype(np.float32)
    np.testing.assert_array_equal(there_and_back(x), expected)


def test_exponents_of_powers_of_two_are_known():
    exponents = jnp.arange(-126, 128, dtype=jnp.int32)
    powers = exact.pow2(exponents)
    np.testing.assert_array_equal(exact.exponent_of(powers), exponents)
    np.testing.assert_array_equal(exact.exponent_of(powers * 1.5), exponents)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_cast_to_its_own_dtype_is_the_identity(dtype):
    x = jnp.asarray([1.2345, -jnp.inf, 1e-40, jnp.nan], dtype)
    y = cast(x, x.dtype)
    assert y.dtype == x.dtype
    assert np.asarray(y).tobytes() == np.asarray(x).tobytes()


def test_magnitude_bits_order_nan_above_all():
    x = np.array([0.0, 1e-45, 1.0, np.inf, np.nan], np.float32)
    bits = np.asarray(exact.magnitude_bits_of(jnp.asarray(np.copysign(x, -1))))
    np.testing.assert_array_equal(bits, x.view(np.int32))
    assert np.all(np.diff(bits) > 0)


@pytest.mark.parametrize(
    ("a", "b"), [(np.nan, 1.0), (1.0, np.nan), (np.nan, np.nan)], ids=repr
)
def test_divide_keeps_nan(a, b):
    assert jnp.isnan(divide(a, jnp.float32(b)))


def test_divide_at_the_edges_of_the_normal_range():
    tiny, largest = np.finfo(np.float32).tiny, np.finfo(np.float32).max
    a = np.float32([1, tiny, largest, largest, tiny])
    b = np.float32([2.0**126, tiny, largest, 2, 1])
    np.testing.assert_array_equal(divide(a, b), a / b)
