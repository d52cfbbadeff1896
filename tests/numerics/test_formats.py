"""The table of formats, and codecs at the edges of their domain."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp4jax.numerics import (
    E2M1,
    E2M1_TO_2,
    E4M3,
    E5M2,
    E8M0,
    F32,
    INT2,
    UE5M3,
    UE5M3_FN,
    UNIFORM,
    formats,
)

GRIDS = pytest.mark.parametrize("grid", formats.GRIDS, ids=repr)
encode = jax.jit(formats.encode, static_argnums=1)
decode = jax.jit(formats.decode, static_argnums=1)


@pytest.mark.parametrize(
    ("fmt", "magnitude_bits", "emax", "nan_code"),
    [
        (E2M1, 3, 2, None),
        (UNIFORM, 3, 2, None),
        (INT2, 1, 2, None),
        (E2M1_TO_2, 3, 2, None),
        (E4M3, 7, 8, 0x7F),
        (E5M2, 7, 15, 0x7F),
        (UE5M3, 8, 15, 0xFF),
        (UE5M3_FN, 8, 16, 0xFF),
        (E8M0, 8, 127, 0xFF),
        (F32, 31, 127, 2**31 - 1),
    ],
    ids=repr,
)
def test_properties(fmt, magnitude_bits, emax, nan_code):
    assert fmt.magnitude_bits == magnitude_bits
    assert (fmt.emax, fmt.nan_code) == (emax, nan_code)
    assert fmt.is_uniform == (fmt in (UNIFORM, INT2))
    assert repr(fmt) == fmt.name


@GRIDS
def test_magnitudes_ascend_to_the_largest(grid):
    assert grid.magnitudes[0] == 0 and grid.magnitudes[-1] == grid.max
    assert list(grid.magnitudes) == sorted(set(grid.magnitudes))


@GRIDS
def test_zero_has_one_code(grid):
    codes = encode(jnp.float32([0.0, -0.0]), grid)
    assert codes.dtype == jnp.uint8
    np.testing.assert_array_equal(codes, [0, 0])


@GRIDS
def test_sign_is_the_bit_above_the_magnitude(grid):
    x = jnp.asarray(grid.magnitudes[1:], jnp.float32)
    sign = 1 << grid.magnitude_bits
    np.testing.assert_array_equal(encode(-x, grid), encode(x, grid) + np.uint8(sign))
    np.testing.assert_array_equal(decode(encode(-x, grid), grid), -x)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (2, 1, 3)], ids=repr)
def test_codecs_keep_the_shape(shape):
    codes = encode(jnp.full(shape, -1.5, jnp.float32), E2M1)
    np.testing.assert_array_equal(codes, np.full(shape, 11, np.uint8))
    np.testing.assert_array_equal(decode(codes, E2M1), np.full(shape, -1.5))
