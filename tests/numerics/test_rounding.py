"""Laws of rounding that hold for every grid."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fp4jax.numerics import NEAREST, Nearest, Stochastic, formats, rounding

GRIDS = pytest.mark.parametrize("grid", formats.GRIDS, ids=repr)
round_nearest = jax.jit(rounding.round_nearest, static_argnums=1)
round_stochastic = jax.jit(rounding.round_stochastic, static_argnums=2)


def test_roundings_are_values():
    assert NEAREST == Nearest() and hash(NEAREST) == hash(Nearest())
    assert Stochastic() == Stochastic() != NEAREST
    assert repr(NEAREST) == "NEAREST" and repr(Stochastic()) == "Stochastic()"


@GRIDS
def test_members_stay(grid):
    members = jnp.asarray(grid.magnitudes, jnp.float32)
    np.testing.assert_array_equal(round_nearest(members, grid), members)
    for bits in (0, 1, 2**16 - 1):
        bits = jnp.full(members.shape, bits, jnp.uint32)
        np.testing.assert_array_equal(round_stochastic(members, bits, grid), members)


@GRIDS
@settings(deadline=None, derandomize=True, max_examples=30)
@given(data=st.data())
def test_laws(grid, data):
    """Members around t, monotone in t and in the bits, and saturating."""
    floats = st.floats(0, 4 * grid.max, width=32)
    t = np.float32(sorted(data.draw(st.lists(floats, min_size=16, max_size=16))))
    bits = sorted(data.draw(st.lists(st.integers(0, 65535), min_size=16, max_size=16)))
    members = np.array(grid.magnitudes)
    below = members[np.searchsorted(members, np.minimum(t, grid.max), "right") - 1]
    above = members[np.searchsorted(members, np.minimum(t, grid.max))]

    nearest = np.asarray(round_nearest(jnp.asarray(t), grid))
    assert np.all((nearest == below) | (nearest == above))
    assert np.all(np.diff(nearest) >= 0)
    drawn = np.asarray(
        round_stochastic(jnp.asarray(t), jnp.asarray(bits, jnp.uint32), grid)
    )
    assert np.all((drawn == below) | (drawn == above))
    assert np.all(np.diff(drawn) >= 0)
