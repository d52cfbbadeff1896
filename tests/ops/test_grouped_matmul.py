"""Grouped products: what computes them, and that tiles without a group do not count."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp4jax import ragged_dot, recipes
from fp4jax.kernels.choice import KERNELS, Kernels
from fp4jax.numerics.groups import Groups
from fp4jax.ops import grouped_matmul
from fp4jax.ops.mosaic import HOPPER

OF = jnp.array([2, 0, 3, 0], jnp.int32)  # the third has no group, no group has number 1
GROUPS = Groups(OF, 3)


def integers(seed, shape):
    """Small ones, whose sums are exact."""
    drawn = jax.random.randint(jax.random.key(seed), shape, -3, 4)
    return drawn.astype(jnp.float32)


X, W, DY = integers(0, (4, 8, 5)), integers(1, (3, 5, 6)), integers(2, (4, 8, 6))


@pytest.mark.parametrize("axis", [1, 2])
@pytest.mark.parametrize("name", ["rows", "scan_rows", "ragged_rows"])
def test_rows_are_multiplied_by_the_matrix_of_their_group(name, axis):
    w = W if axis == 1 else W.mT
    product = getattr(grouped_matmul, name)
    found = product(X, w, GROUPS, axis=axis, precision=None)
    for tile, group in enumerate(OF):
        expected = X[tile] @ W[group] if group < 3 else jnp.zeros((8, 6))
        np.testing.assert_array_equal(found[tile], expected)


@pytest.mark.parametrize("name", ["weights", "scan_weights", "ragged_weights"])
def test_weights_sum_over_the_tiles_of_their_group(name):
    found = getattr(grouped_matmul, name)(X, DY, GROUPS, precision=None)
    expected = [X[1].T @ DY[1] + X[3].T @ DY[3], jnp.zeros((5, 6)), X[0].T @ DY[0]]
    np.testing.assert_array_equal(found, jnp.stack(expected))


def loss(x, w):
    sizes, key = jnp.array([100, 0, 156], jnp.int32), jax.random.key(0)
    y = ragged_dot(x, w, sizes, recipe=recipes.ufp4(), key=key)
    return jnp.sum(y.astype(jnp.float32))


def test_kernels_of_the_context_multiply_what_they_support():
    calls = []

    def noted(name):
        def call(x, *args, **kwargs):
            calls.append((name, x.dtype))
            return getattr(HOPPER, name)(x, *args, **kwargs)

        return call

    kernels = dataclasses.replace(HOPPER, rows=noted("rows"))
    x, w = jnp.ones((256, 128), jnp.bfloat16), jnp.ones((3, 128, 256), jnp.bfloat16)
    plain = jax.jit(loss).trace(x, w).lower(lowering_platforms=("cuda",)).as_text()
    with KERNELS(Kernels(products=kernels)):
        lowered = jax.jit(loss).trace(x, w).lower(lowering_platforms=("cuda",))
        jax.eval_shape(loss, x[:, :40], w[:, :40])  # no whole blocks: by the scan
    assert calls == [("rows", jnp.bfloat16)]
    assert "mosaic_gpu" in lowered.as_text() and "mosaic_gpu" not in plain
