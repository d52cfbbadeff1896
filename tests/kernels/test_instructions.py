"""What a GPU computes, one operation at a time: nothing can be simplified."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp4jax.kernels.instructions import PORTABLE, Nvidia
from fp4jax.numerics.formats import GRIDS


def add_down(t, offset):
    """Rounds a sum toward zero, by way of float64."""
    exact = np.asarray(t, np.float64) + np.asarray(offset, np.float64)
    near = np.float32(exact)
    down = np.where(near > exact, np.nextafter(near, np.float32(0)), near)
    return jnp.asarray(down, jnp.float32)


NVIDIA = Nvidia(add_down, jnp.reciprocal)


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
