"""Tensor scales of groups: every one is that of its entries alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from fp4jax import recipes
from fp4jax.numerics import E2M1, E4M3, Fresh, Quantizer, Scale, Site, quantize
from fp4jax.numerics.blockwise import quantize_blocks
from fp4jax.numerics.groups import Groups

OF = jnp.array([2, 0, 2, 0, 3], jnp.int32)
X = jax.random.normal(jax.random.key(0), (5, 16, 32)) * jnp.arange(1, 6)[:, None, None]


def test_an_amax_is_of_the_entries_of_a_group():
    expected = [jnp.max(jnp.abs(X[OF == i]), initial=0) for i in range(4)]
    np.testing.assert_array_equal(Groups(OF, 4).amax(X), jnp.float32(expected))
    amax = Groups(OF, 4).amax(X.at[0, 1, 2].set(jnp.nan))
    np.testing.assert_array_equal(jnp.isnan(amax), [False, False, True, False])
    each = Groups(None, 5).amax(X)
    np.testing.assert_array_equal(each, jnp.max(jnp.abs(X), (1, 2)))


def test_an_amax_is_that_over_the_devices():
    mesh = jax.make_mesh((2,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,))
    groups = Groups(jnp.zeros(2, jnp.int32), 1, axes=("rows",))
    amax = jax.shard_map(
        groups.amax, mesh=mesh, in_specs=P("rows"), out_specs=P(), check_vma=False
    )
    assert amax(X[:4]) == jnp.max(jnp.abs(X[:4]))


@pytest.mark.parametrize("block", [16, (16, 16)])
def test_groups_are_quantized_as_arrays_of_their_own(block):
    quantizer = Quantizer(E2M1, block, Scale(E4M3), Fresh())
    found = quantize_blocks(
        X, quantizer, axis=2, other=1 if block != 16 else None, groups=Groups(OF, 4)
    ).dequantized()
    for i in (0, 2, 3):
        flat = X[OF == i].reshape(-1, 32)
        expected = quantize_blocks(flat, quantizer, axis=1).dequantized()
        np.testing.assert_array_equal(found[OF == i].reshape(-1, 32), expected)
    whole = quantize(X[0], quantizer, axis=1)
    assert whole.tensor_scale != found[0].max()  # groups differ from one tensor


def test_blocks_of_different_groups_draw_for_themselves():
    quantizer = recipes.quartet2().wgrad.dy  # whose scales are what it draws for
    tile = jax.random.normal(jax.random.key(1), (1, 128, 16))
    tokens = jnp.arange(256, dtype=jnp.uint32).reshape(128, 2).T  # one for each in turn
    found = quantize_blocks(
        jnp.repeat(tile, 2, axis=0),
        quantizer,
        axis=1,
        key=jax.random.key(2),
        tokens=tokens,
        groups=Groups(None, 2),
        site=Site.WGRAD_DY,
    )
    first, second = found.scale
    assert 0.1 < jnp.mean(first != second) < 0.9


def test_a_held_amax_is_one_for_each_group():
    quantizer = Quantizer(E2M1, 16, Scale(E4M3), Fresh())
    with pytest.raises(ValueError, match=r"amax must be of shape \(4,\)"):
        quantize_blocks(X, quantizer, axis=2, amax=jnp.float32(1), groups=Groups(OF, 4))
