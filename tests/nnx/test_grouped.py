"""Layers of groups: their recipes, their state, and who knows of them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import fp4jax
import fp4jax.nnx
from fp4jax import recipes
from fp4jax.numerics import Site
from fp4jax.ops.tiles import Tiles, tile_rows

SIZES = jnp.array([5, 0, 11])
X = jax.random.normal(jax.random.key(1), (16, 32))


def experts(recipe=None, *, stack=None):
    def make(rngs):
        layer = fp4jax.nnx.GroupedLinear(3, 32, 16, rngs=rngs)
        if recipe is not None:
            fp4jax.nnx.quantize_model(layer, recipe, rngs=rngs)
        return layer

    rngs = nnx.Rngs(0)
    return make(rngs) if stack is None else nnx.vmap(make)(rngs.split(stack))


def test_a_layer_is_the_product_of_its_recipe():
    layer, recipe = experts(recipes.mxfp8()), recipes.mxfp8()
    w = layer.kernel[...]
    expected = jax.jit(lambda w: fp4jax.ragged_dot(X, w, SIZES, recipe=recipe))(w)
    found = nnx.jit(lambda layer: layer(X, SIZES))(layer)
    np.testing.assert_array_equal(found, expected)
    plain = experts()
    np.testing.assert_array_equal(plain(X, SIZES), jax.lax.ragged_dot(X, w, SIZES))


def test_every_group_holds_amaxes_that_a_step_writes():
    layer = experts(recipes.ue5m3())

    @nnx.jit
    def step(layer, i):
        fp4jax.nnx.set_step(layer, i)
        loss_fn = lambda layer: jnp.sum(layer(X, SIZES))
        return fp4jax.nnx.value_and_grad(loss_fn)(layer)

    step(layer, 0)
    held = layer.ragged_dot.held[...]
    w = jnp.max(jnp.abs(layer.kernel[...]), (1, 2))
    x = jnp.float32([jnp.max(jnp.abs(X[:5])), 0, jnp.max(jnp.abs(X[5:]))])
    np.testing.assert_array_equal(held, jnp.stack([x, w, jnp.float32([1, 0, 1])], 1))
    assert experts(recipes.ue5m3(), stack=2).ragged_dot.held.shape == (2, 3, 3)


def test_explain_shows_a_product_of_each_group():
    layer = experts(recipes.ufp4())
    for explanation in (fp4jax.explain(layer, X, SIZES), fp4jax.explain(layer)):
        (row,) = explanation.matmuls
        assert row.sizes[1:] == (None, 32, 16) and row.is_called
        assert row.recipe == recipes.ufp4()
    (row,) = fp4jax.explain(layer, X, SIZES).matmuls
    assert row.sizes[0] == 3 and "zeros" not in row.operands("fprop")[0]


def test_capture_records_rows_and_kernels():
    layer = experts(recipes.ufp4())

    def loss(layer, x):
        fp4jax.nnx.set_step(layer, 0)
        return jnp.sum(layer(x, SIZES) ** 2)

    found = fp4jax.capture(loss, layer, X)[""]
    np.testing.assert_array_equal(found.x, X)
    np.testing.assert_array_equal(found.w, layer.kernel[...])
    np.testing.assert_array_equal(found.dy, 2 * layer(X, SIZES))


@pytest.mark.parametrize("stack", [None, 2])
def test_weights_are_quantized_once(stack):
    layer = experts(recipes.ti2d(), stack=stack)
    fp4jax.nnx.set_step(layer, 0)
    fp4jax.nnx.quantize_weights(layer)
    packed = layer.ragged_dot.weight.get_value()
    assert packed.fprop.codes.shape == (*(() if stack is None else (2,)), 3, 16, 16)
    assert {packed.fprop.site, packed.dgrad.site} == {Site.FPROP_W, Site.DGRAD_W}
    fp4jax.nnx.set_step(layer, 1)
    assert layer.ragged_dot.weight.get_value() is None


def test_what_a_call_cannot_honor_raises():
    layer, recipe = experts(recipes.mxfp8()), recipes.mxfp8()
    with pytest.raises(ValueError, match="num_positions and packed must be None where"):
        layer(X, SIZES, num_positions=20)
    tiles = Tiles.of_sizes(SIZES, len(X), rows=tile_rows(recipe))
    rows = tiles.lay_out(X)
    fp4jax.nnx.set_step(layer, 0, microbatch=1)
    with pytest.raises(
        ValueError, match="num_positions must be given for a microbatch"
    ):
        layer(rows, tiles.groups)
    y = tiles.rows_of(layer(rows, tiles.groups, num_positions=len(X)))
    np.testing.assert_array_equal(y, layer(X, SIZES))
