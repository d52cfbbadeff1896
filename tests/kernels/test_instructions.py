"""What a GPU computes, one operation at a time: nothing can be simplified."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp4jax.kernels.instructions import Nvidia
from fp4jax.numerics import exact
from fp4jax.numerics.formats import E2M1, F32, GRIDS, SCALE_FORMATS, UNIFORM
from fp4jax.numerics.instructions import PORTABLE


def add_down(t, offset):
    """Rounds a sum toward zero, by way of float64."""
    exact = np.asarray(t, np.float64) + np.asarray(offset, np.float64)
    near = np.float32(exact)
    down = np.where(near > exact, np.nextafter(near, np.float32(0)), near)
    return jnp.asarray(down, jnp.float32)


def high_halves(first, second):
    return (first & np.uint32(0xFFFF0000)) | (second >> 16)


NVIDIA = Nvidia(add_down, jnp.reciprocal, high_halves)


def magnitudes(grid):
    """Members, the middles between them, their neighbors, and what saturates."""
    members = np.float32(grid.magnitudes)
    middles = (members[1:] + members[:-1]) / 2
    near = np.concatenate([members, middles])
    around = [np.nextafter(near, np.float32(end)) for end in (0, np.inf)]
    drawn = np.random.default_rng(0).uniform(0, 1.2 * grid.max, 500)
    small = np.float32([0, 1e-6, 2**-20, 2**-30, np.inf, np.nan])
    return jnp.asarray(np.concatenate([near, *around, drawn, small]), jnp.float32)


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_rounding_equals_the_reference(grid):
    t = magnitudes(grid)
    bits = jnp.asarray(np.random.default_rng(1).integers(0, 2**16, t.size), jnp.uint32)
    bits = bits.at[::3].set(0).at[1::3].set(2**16 - 1)
    with jax.disable_jit():
        rounded = NVIDIA.nearest(t, grid), NVIDIA.stochastic(t, bits, grid)

    @jax.jit
    def expected(t, bits):
        return PORTABLE.nearest(t, grid), PORTABLE.stochastic(t, bits, grid)

    np.testing.assert_array_equal(rounded, expected(t, bits))


@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_codes_equal_the_reference(grid):
    members = np.float32(grid.magnitudes)
    values = np.concatenate([members, -members])
    codes = NVIDIA.code(values, grid)  # of NumPy, which keeps subnormals
    expected = jax.jit(PORTABLE.code, static_argnums=1)(values, grid)
    np.testing.assert_array_equal(codes, expected)


@pytest.mark.parametrize("fmt", [f for f in SCALE_FORMATS if f != F32], ids=str)
def test_codes_of_scales_equal_the_reference(fmt):
    scales = np.float32(fmt.magnitudes)[fmt.exponent_bits == 8 :]  # no subnormal
    codes = NVIDIA.code(scales, fmt)
    expected = jax.jit(PORTABLE.code, static_argnums=1)(scales, fmt)
    np.testing.assert_array_equal(codes, expected)


@pytest.mark.parametrize("grid", [E2M1, UNIFORM], ids=str)
def test_words_equal_the_reference(grid):
    members = np.float32(grid.magnitudes)
    members = np.concatenate([members, -members])
    values = np.random.default_rng(0).choice(members, (16, 200)).astype(np.float32)
    found = NVIDIA.words(list(values), grid, 4, 8)
    expected = jax.jit(lambda values: PORTABLE.words(values, grid, 4, 8))(list(values))
    assert len(found) == len(expected) == 2
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("grid", [E2M1, UNIFORM], ids=str)
def test_words_of_the_nearest_equal_the_reference(grid):
    t = magnitudes(grid)
    t = jnp.concatenate([t, -t])
    t = np.random.default_rng(0).permuted(np.tile(t, (16, 1)), axis=1)

    @jax.jit
    def expected(t):
        values = exact.with_sign_of(PORTABLE.nearest(jnp.abs(t), grid), t)
        return PORTABLE.words(list(values), grid, 4, 8)

    with jax.disable_jit():
        found = NVIDIA.words([], grid, 4, 8, list(map(jnp.asarray, t)))
    for a, b in zip(found, expected(t), strict=True):
        np.testing.assert_array_equal(a, b)
