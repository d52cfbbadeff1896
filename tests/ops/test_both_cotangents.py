"""The cotangent of a product is quantized for both gradients from one read of it."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp4jax
from fp4jax import recipes
from fp4jax.kernels import devices
from fp4jax.kernels.choice import KERNELS, Kernels
from fp4jax.kernels.quantize import INTERPRETED, MOSAIC
from tests.kernels.cases import FITTING, mosaic
from tests.ops.test_kernels import count

KEYS = jax.random.split(jax.random.key(0), 4)
TOKENS = (((2,), (0,)), ((), ()))  # [b, s, k] [k, n]
WEIGHT_FIRST = (((0,), (2,)), ((), ()))  # [k, n] [b, s, k]
OF_BATCHES = (((2,), (1,)), ((0,), (0,)))  # [b, s, k] [b, k, n]


def gradients(recipe, dims=TOKENS, **how):
    """What maps both operands and dy to the gradients."""

    def function(a, b, dy):
        dot = functools.partial(fp4jax.dot_general, dimension_numbers=dims, **how)
        return jax.vjp(lambda a, b: dot(a, b, recipe=recipe, key=KEYS[3]), a, b)[1](dy)

    return function


def arrays(*shapes):
    """Operands and the cotangent of their product."""
    pairs = zip(KEYS, shapes, strict=False)
    return [jax.random.normal(key, shape, jnp.bfloat16) for key, shape in pairs]


def check(function, args, by, both):
    """Asserts that gradients are those of XLA, and how often dy is read once."""
    expected = jax.jit(function)(*args)
    with KERNELS(Kernels(quantize=by)):
        traced = jax.jit(function).trace(*args)
        found = jax.jit(function)(*args)
    assert count(traced.jaxpr, "fp4_quantize_both") == both
    jax.tree.map(np.testing.assert_array_equal, found, expected)


X_W_DY = arrays((2, 32, 64), (64, 128), (2, 32, 128))


@pytest.mark.parametrize(
    "recipe, both",
    [
        (recipes.ufp4(), 1),
        (recipes.nvfp4(), 1),
        (recipes.e2m1_ref(), 1),
        (recipes.mxfp4(), 1),
        (recipes.ti2d(), 0),
        (recipes.quartet2(), 0),
        (dataclasses.replace(recipes.ufp4(), compute="f32"), 0),
    ],
    ids=["ufp4", "nvfp4", "e2m1_ref", "mxfp4", "ti2d", "quartet2", "f32"],
)
def test_recipes_that_quantize_dy_twice_read_it_once(recipe, both):
    check(gradients(recipe), X_W_DY, FITTING, both)


@pytest.mark.parametrize(
    "dims, how, shapes, both",
    [
        (WEIGHT_FIRST, {"weight": "lhs"}, ((64, 128), (2, 32, 64), (128, 2, 32)), 1),
        (OF_BATCHES, {}, ((2, 32, 64), (2, 64, 128), (2, 32, 128)), 1),
        (TOKENS, {}, ((2, 20, 64), (64, 128), (2, 20, 128)), 0),
        (TOKENS, {}, ((2, 32, 64), (64, 24), (2, 32, 24)), 0),
    ],
    ids=["weight-first", "batches", "odd-tokens", "odd-features"],
)
def test_products_of_every_kind(dims, how, shapes, both):
    check(gradients(recipes.ufp4(), dims, **how), arrays(*shapes), FITTING, both)


def test_lanes_and_microbatches():
    function = gradients(recipes.ufp4(), microbatch=3)
    lanes = jax.vmap(jax.checkpoint(function), in_axes=(0, None, 0))
    x, w, dy = X_W_DY
    check(lanes, (jnp.stack([x, -x]), w, jnp.stack([dy, 2 * dy])), FITTING, 1)


@mosaic
def test_the_interpreted_kernel_gives_the_gradients():
    check(gradients(recipes.ufp4()), X_W_DY, INTERPRETED, 1)


@mosaic
@pytest.mark.parametrize("name, kernels", [("ufp4", 5), ("nvfp4", 7)])
def test_one_kernel_of_a_layer_is_of_both(name, kernels, monkeypatch):
    monkeypatch.setattr(devices, "without_mosaic", lambda: None)
    x, w, dy = arrays((2, 32, 128), (128, 256), (2, 32, 256))

    def layer(x, w, dy):
        y, backward = jax.vjp(lambda x, w: dot(x, w), x, w)
        return y, backward(dy)

    dot = functools.partial(
        fp4jax.dot_general,
        dimension_numbers=TOKENS,
        recipe=getattr(recipes, name)(),
        key=KEYS[3],
    )
    with KERNELS(Kernels(quantize=MOSAIC)):
        text = jax.jit(layer).trace(x, w, dy).lower(lowering_platforms=("cuda",))
    assert len(re.findall(r"custom_call @mosaic_gpu\w*\(", text.as_text())) == kernels
