import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import fp4jax
from fp4jax import recipes
from fp4jax.numerics import E2M1, E8M0, UNIFORM, Quantizer, Scale, Site
from fp4jax.ops import fp8
from fp4jax.ops.noise import Noise
from fp4jax.ops.operands import Asked, make_operand

MATRICES = (((1,), (0,)), ((), ()))
RECIPES = {
    "ti2d": recipes.ti2d(block=8),
    "mxfp4": recipes.mxfp4(),
    "ufp4": recipes.ufp4(Scale(E8M0)),
}


def spread(shape, key, *, binades):
    """Values whose block scales spread along both axes."""
    exponents, values = jax.random.split(jax.random.key(key))
    blocks = [-(-n // 32) for n in shape]
    exponent = jax.random.randint(exponents, blocks, -binades, 1)
    for axis in (0, 1):
        exponent = jnp.repeat(exponent, 32, axis)
    scale = jnp.exp2(exponent[: shape[0], : shape[1]].astype(jnp.float32))
    return jax.random.normal(values, shape) * scale


@functools.partial(jax.jit, static_argnames="recipe")
def products(x, w, dy, *, recipe):
    """All three GEMMs of a layer."""
    dot = functools.partial(fp4jax.dot_general, recipe=recipe, key=jax.random.key(3))
    y, backward = jax.vjp(lambda x, w: dot(x, w, MATRICES), x, w)
    return y, *backward(dy)


@functools.partial(jax.jit, static_argnames="recipe")
def product(x, w, *, recipe):
    return fp4jax.dot_general(x, w, MATRICES, recipe=recipe)


def error(found, expected):
    return np.linalg.norm(found - expected) / np.linalg.norm(expected)


@pytest.mark.parametrize(
    "of_x, of_w", [(P(("a", "b")), P(None, "b")), (P("a"), P("b"))], ids=["n", "k"]
)
def test_operands_may_be_spread_on_explicit_axes(of_x, of_w):
    recipe = dataclasses.replace(recipes.ti2d(block=8), compute="fp8")
    mesh = jax.make_mesh((2, 2), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)
    x, w = spread((32, 32), 0, binades=4), spread((32, 32), 1, binades=4)

    def gradients(x, w, out_sharding=None):
        def total(x, w):
            dot = functools.partial(fp4jax.dot_general, out_sharding=out_sharding)
            return dot(x, w, MATRICES, recipe=recipe, key=jax.random.key(3)).sum()

        return jax.jit(jax.grad(total, (0, 1)))(x, w)

    expected = gradients(x, w)
    with jax.set_mesh(mesh):
        parts = jax.device_put(
            (x, w), tuple(NamedSharding(mesh, s) for s in (of_x, of_w))
        )
        found = gradients(*parts, out_sharding=P(of_x[0], None))
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6)


@pytest.mark.parametrize("name", RECIPES)
def test_equals_the_bfloat16_path(name):
    recipe = RECIPES[name]
    x, w, dy = (
        spread(shape, key, binades=10)
        for key, shape in enumerate([(72, 96), (96, 40), (72, 40)])
    )
    expected = products(x, w, dy, recipe=recipe)
    found = products(x, w, dy, recipe=dataclasses.replace(recipe, compute="fp8"))
    for a, b in zip(found, expected, strict=True):
        assert error(a, b) <= 1e-5


def operand(x, quantizer):
    asked = Asked(quantizer, Site.FPROP_X, Noise(jax.random.key(0)))
    return make_operand(x, asked, axis=1, batch=0)


@pytest.mark.parametrize("grid, binades", [(E2M1, 14), (UNIFORM, 15)])
def test_the_window_is_exact_to_its_edge(grid, binades):
    quantizer = Quantizer(grid, block=16, scale=Scale(E8M0))
    assert fp8.window(grid) == binades
    smallest = grid.magnitudes[1]
    for distance, fits in ((binades, True), (binades + 1, False)):
        x = jnp.full((1, 32), grid.max).at[0, 16:].multiply(2.0**-distance)
        x = x.at[0, 17].set(smallest * 2.0**-distance)
        made = operand(x, quantizer)
        scaled = fp8.scaled(made, quantizer)
        assert bool(scaled.fits) == fits
        back = scaled.array.astype(jnp.float32) * jnp.exp2(
            scaled.exponent.astype(jnp.float32)
        )
        exact = bool(jnp.array_equal(back, made.values(jnp.float32)))
        assert exact == fits


def test_a_zero_block_does_not_widen_the_window():
    quantizer = RECIPES["mxfp4"].fprop.x
    x = jnp.ones((2, 64)).at[0, :32].set(0).at[1].set(0)
    assert fp8.scaled(operand(x, quantizer), quantizer).fits


def test_a_wider_spread_takes_bfloat16():
    recipe = RECIPES["mxfp4"]
    x = spread((40, 128), 0, binades=30)
    w = spread((128, 24), 1, binades=2)
    assert not fp8.scaled(operand(x, recipe.fprop.x), recipe.fprop.x).fits
    found = product(x, w, recipe=dataclasses.replace(recipe, compute="fp8"))
    np.testing.assert_array_equal(found, product(x, w, recipe=recipe))


def test_nan_reaches_the_result():
    recipe = dataclasses.replace(RECIPES["mxfp4"], compute="fp8")
    x = jnp.ones((40, 64)).at[3, 5].set(jnp.nan)
    y = product(x, jnp.ones((64, 8)), recipe=recipe)
    assert jnp.isnan(y[3]).all() and jnp.isnan(y).sum() == 8


def test_scales_of_any_size_come_back():
    recipe = dataclasses.replace(RECIPES["mxfp4"], compute="fp8")
    x, w = jnp.full((32, 32), 2.0**100), jnp.full((32, 32), 2.0**-100)
    y = product(x, w, recipe=recipe)
    np.testing.assert_array_equal(y, jnp.full((32, 32), 32.0))


def test_lowers_to_products_of_float8():
    recipe = dataclasses.replace(RECIPES["ti2d"], compute="fp8")
    shapes = ((64, 64), (64, 32), (64, 32))
    arguments = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes)
    traced = products.trace(*arguments, recipe=recipe)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    lines = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
    assert sum("f8E4M3FN" in line and "HIGHEST" in line for line in lines) == 3
    assert sum("bf16" in line for line in lines) == 3  # where operands do not fit


def test_operands_of_other_scales_stay_in_bfloat16():
    recipe = dataclasses.replace(recipes.mxfp8(), compute="fp8")
    x, w = spread((32, 64), 0, binades=10), spread((64, 16), 1, binades=10)
    found, expected = (
        product(x, w, recipe=recipe),
        product(x, w, recipe=recipes.mxfp8()),
    )
    np.testing.assert_array_equal(found, expected)
