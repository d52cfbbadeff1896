"""The transposition-invariant recipe against its definition, and its invariance."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import fp4jax
from fp4jax import recipes
from fp4jax.numerics import E2M1, E4M3, E8M0, NEAREST, Scale, Site, formats
from tests.golden import inputs

KEY = jax.random.key(11)
MATMUL = (((1,), (0,)), ((), ()))
BLOCKS = (8, 16, 32, 64)
SHAPES = ((64, 128), (40, 72), (33, 7), (1, 100))

quantize = jax.jit(
    fp4jax.quantize, static_argnums=1, static_argnames=("axis", "other", "site")
)


def weights(block):
    return recipes.ti2d(block=block).fprop.w


def truncation_free(x, block):
    """Values and scales by numpy: each square by 2^ceil(log2(amax / 6))."""
    rows, columns = (-n % block for n in x.shape)
    x = np.pad(np.float64(x), ((0, rows), (0, columns)))
    tiles = x.reshape(x.shape[0] // block, block, -1, block)
    mantissa, exponent = np.frexp(np.abs(tiles).max((1, 3)) / 6)
    exponent = np.where(mantissa == 0, -125, exponent - (mantissa == 0.5))
    scales = np.ldexp(1.0, exponent)
    t = x / np.kron(scales, np.ones((block, block)))
    return np.float64(np.float32(t).astype(ml_dtypes.float4_e2m1fn)), scales


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_equals_its_definition_and_commutes_with_transposition(shape, block):
    x = inputs.matrix("heavy", "bfloat16", shape)
    rows, columns = shape
    quantizer = weights(block)
    q = quantize(jnp.asarray(x), quantizer)
    values, scales = truncation_free(x, block)
    np.testing.assert_array_equal(q.scales, scales)
    decoded = formats.decode(q.codes, E2M1)[:, :columns]
    np.testing.assert_array_equal(decoded, values[:rows, :columns])

    across = quantize(jnp.asarray(x.T), quantizer, axis=0, other=1)
    np.testing.assert_array_equal(across.codes.T, q.codes)
    along = quantize(jnp.asarray(x.T), quantizer)
    np.testing.assert_array_equal(along.codes[:, :rows].T, q.codes[:, :columns])
    for other in (across, along):
        np.testing.assert_array_equal(other.scales.T, q.scales)
        np.testing.assert_array_equal(fp4jax.dequantize(other).T, fp4jax.dequantize(q))


def test_rows_of_blocks_would_not_commute():
    x = jnp.asarray(inputs.matrix("heavy", "bfloat16", (64, 128)))
    row = dataclasses.replace(weights(32), block=32)
    views = (
        fp4jax.dequantize(quantize(a, row, axis=axis)) for a, axis in ((x, 1), (x.T, 1))
    )
    a, b = (np.asarray(view) for view in views)
    assert np.mean(a != b.T) > 0.05


@functools.partial(jax.jit, static_argnames="recipe")
def gradients(recipe, x, w, dy):
    dot = functools.partial(
        fp4jax.dot_general, dimension_numbers=MATMUL, recipe=recipe, key=KEY
    )
    return jax.vjp(dot, x, w)[1](dy)


def seen_through_identities(recipe, dy):
    """dy as dgrad and as wgrad multiply it.

    Squares of the identity quantize exactly, so dx and dw are quantized dy.
    """
    m, n = dy.shape
    k = max(m, n)
    dx, dw = gradients(recipe, jnp.eye(m, k), jnp.eye(k, n), jnp.asarray(dy))
    return np.asarray(dx)[:, :n], np.asarray(dw)[:m]


@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("shape", [(64, 96), (40, 33)], ids=str)
def test_dgrad_and_wgrad_multiply_one_stochastic_dy(shape, block):
    recipe = recipes.ti2d(block=block)
    assert recipe.dgrad.dy.is_stochastic
    dy = inputs.matrix("heavy", "float32", shape)
    by_dgrad, by_wgrad = seen_through_identities(recipe, dy)
    np.testing.assert_array_equal(by_dgrad, by_wgrad)
    q = quantize(jnp.asarray(dy), recipe.dgrad.dy, key=KEY, site=Site.DGRAD_DY)
    np.testing.assert_array_equal(by_dgrad, fp4jax.dequantize(q))
    nearest = dataclasses.replace(recipe.dgrad.dy, rounding=NEAREST)
    assert np.any(by_dgrad != fp4jax.fake_quant(jnp.asarray(dy), nearest))


def test_two_draws_would_differ():
    recipe = dataclasses.replace(recipes.ti2d(), share_dy=False)
    dy = inputs.matrix("normal", "float32", (64, 64))
    by_dgrad, by_wgrad = seen_through_identities(recipe, dy)
    assert np.mean(by_dgrad != by_wgrad) > 0.1


@pytest.mark.parametrize("operand", ["x", "w"])
def test_forward_and_backward_multiply_one_operand(operand):
    """y = Q(x) for w = I, and dw = Q(x)^T for dy = I; likewise for w."""
    recipe = recipes.ti2d()
    a = jnp.asarray(inputs.matrix("heavy", "bfloat16", (40, 56)))
    eye = jnp.eye(56)
    dot = functools.partial(
        fp4jax.dot_general, dimension_numbers=MATMUL, recipe=recipe, key=KEY
    )
    if operand == "x":
        y, vjp = jax.vjp(dot, a, eye)
        _, backward = vjp(jnp.eye(40, 56))  # [k, n], its rows x^T
        np.testing.assert_array_equal(backward[:, :40].T, y)
    else:
        y, vjp = jax.vjp(dot, jnp.eye(40), a)
        backward, _ = vjp(jnp.eye(40, 56))  # [m, k], its rows w^T
        np.testing.assert_array_equal(backward, np.asarray(y).T[:40])


@pytest.mark.parametrize("scale", [Scale(E8M0, "floor"), Scale(E4M3)], ids=str)
def test_every_scale_is_that_of_the_transpose(scale):
    recipe = recipes.ti2d(block=16, scale=scale)
    assert recipe.dgrad.dy == recipe.wgrad.dy and recipe.dgrad.dy.scale == scale
    a = jnp.asarray(inputs.matrix("heavy", "float32", (40, 56)))
    found = fp4jax.fake_quant(a, recipe.fprop.w)
    np.testing.assert_array_equal(found, fp4jax.fake_quant(a.T, recipe.fprop.w).T)
    assert np.any(found != fp4jax.fake_quant(a, recipes.ti2d(block=16).fprop.w))
