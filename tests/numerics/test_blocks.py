"""Padding, splitting, joining, largest magnitudes and positions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp4jax.numerics import blocks
from fp4jax.numerics.blocks import Tiling

amax = jax.jit(blocks.amax, static_argnums=1)


def test_pad_to_multiple():
    x = np.arange(1.0, 16, dtype=np.float32).reshape(3, 5)
    padded = blocks.pad_to_multiple(jnp.asarray(x), {0: 2, 1: 4})
    np.testing.assert_array_equal(padded, np.pad(x, ((0, 1), (0, 3))))
    x = jnp.asarray(x)
    assert blocks.pad_to_multiple(x, {0: 3, 1: 5}) is x
    assert blocks.pad_to_multiple(x, {}) is x


@pytest.mark.parametrize(
    ("shape", "sizes", "split"),
    [
        ((5,), {0: 2}, (3, 2)),
        ((4, 6), {1: 3}, (4, 2, 3)),
        ((3, 5, 2), {1: 4}, (3, 2, 4, 2)),
        ((5, 2, 7), {2: 4, 0: 4}, (2, 4, 2, 2, 4)),
        ((0, 5), {1: 4}, (0, 2, 4)),
        ((5, 0), {1: 4}, (5, 0, 4)),
    ],
    ids=str,
)
def test_split_and_join(shape, sizes, split):
    tiling = Tiling(shape, sizes)
    x = jnp.arange(np.prod(shape), dtype=jnp.float32).reshape(shape)
    parts = tiling.split(x)
    assert parts.shape == split
    assert [split[i] for i in tiling.inside] == [sizes[i] for i in sorted(sizes)]
    np.testing.assert_array_equal(parts.reshape(tiling.padded).sum(), x.sum())
    np.testing.assert_array_equal(tiling.join(parts), x)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_amax_equals_numpy(dtype):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(64, 80)), dtype)
    expected = np.abs(np.asarray(x, np.float32))
    for axes in ((0,), (1,), (0, 1)):
        largest = amax(x, axes)
        assert largest.dtype == jnp.float32
        np.testing.assert_array_equal(largest, expected.max(axes, keepdims=True))
    np.testing.assert_array_equal(amax(x, None), expected.max())


# Maxima of floats lose a NaN from arrays that a compiler splits among threads or lanes.
@pytest.mark.parametrize("n", [3, 16, 64, 300])
@pytest.mark.parametrize("sign", [1, -1])
def test_amax_of_a_nan_is_nan(n, sign):
    x = np.ones((n, n), np.float32)
    x[np.arange(n), np.arange(n)] = np.copysign(np.nan, sign)
    for axes in ((0,), (1,), None):
        assert np.all(np.isnan(amax(x, axes)))
    one = np.ones((n, n), np.float32)
    one[n // 2, n // 3] = np.copysign(np.nan, sign)
    assert jnp.isnan(amax(one, None))
    assert np.isnan(amax(one, (1,))).sum() == 1


def test_amax_of_nothing_is_zero():
    assert amax(jnp.zeros((0, 4)), None) == 0
    np.testing.assert_array_equal(amax(jnp.zeros((3, 0)), (1,)), np.zeros((3, 1)))


def test_amax_keeps_infinities_and_subnormals():
    assert amax(jnp.float32([1, -jnp.inf]), None) == jnp.inf
    x = np.float32([1e-40, -3e-41])
    assert np.asarray(amax(x, None)).view(np.int32) == x.view(np.int32)[0]


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_positions_count_the_unpadded_operand(axis):
    shape, sizes = (3, 5, 4), {0: 2, 2: 8}
    row, column = blocks.positions(Tiling(shape, sizes), axis)
    assert row.dtype == column.dtype == jnp.uint32
    free = [n for i, n in enumerate(shape) if i != axis]
    index = np.arange(np.prod(free)).reshape(free)
    inside = tuple(slice(n) for n in shape)
    rows, columns = np.broadcast_arrays(row, column)
    assert rows.shape == (4, 5, 8)
    np.testing.assert_array_equal(
        rows[inside], np.broadcast_to(np.expand_dims(index, axis), shape)
    )
    np.testing.assert_array_equal(
        np.moveaxis(columns, axis, -1)[0, 0], range(columns.shape[axis])
    )


@pytest.mark.parametrize(
    "shape", [(2**32 + 1, 2), (2, 2**32 + 1), (2**17, 2**16, 2)], ids=str
)
def test_positions_refuse_what_does_not_fit(shape):
    with pytest.raises(ValueError, match=r"at most 2\^32 rows and columns, got shape="):
        jax.eval_shape(lambda: blocks.positions(Tiling(shape, {}), len(shape) - 1))


def test_positions_take_what_fits():
    tiling = Tiling((1, 2**16, 2**16, 2), {})
    row, column = jax.eval_shape(lambda: blocks.positions(tiling, 3))
    assert row.shape == (1, 2**16, 2**16, 1) and column.shape == (1, 1, 1, 2)
