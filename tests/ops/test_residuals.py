"""Packed residuals: the same gradients from fewer bytes, and one copy for siblings."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp4jax import dot_general, recipes
from fp4jax.numerics import UE5M3, Scale
from fp4jax.ops.dot_general import pack_x

KEY = jax.random.key(0)
RECIPES = {
    "int2": recipes.int2(),
    "mxfp4_tseng": recipes.mxfp4_tseng(),
    "mxfp8": recipes.mxfp8(),
    "nvfp4": recipes.nvfp4(),
    "quartet2": recipes.quartet2(),
    "ti2d": recipes.ti2d(block=8),
    "ue5m3": recipes.ue5m3(),
    "ufp4": recipes.ufp4(),
}
# Dimension numbers, the shapes of lhs and rhs, and which of them is w.
CASES = {
    "linear": ((((2,), (0,)), ((), ())), (3, 7, 20), (20, 12), "rhs"),
    "weight_first": ((((1,), (1,)), ((), ())), (12, 20), (3, 20, 7), "lhs"),
    "experts": ((((2,), (1,)), ((0,), (0,))), (2, 21, 20), (2, 20, 12), "rhs"),
}


WGRAD = {name: recipes.Recipe(wgrad=RECIPES[name].wgrad) for name in ("nvfp4", "ufp4")}


def packed(recipe):
    return dataclasses.replace(recipe, residuals="packed")


def gradients(recipe, dims, x, w, weight="rhs", **kwargs):
    def loss(x, w):
        y = dot_general(x, w, dims, recipe=recipe, key=KEY, weight=weight, **kwargs)
        return jnp.sum(jnp.sin(y.astype(jnp.float32)))

    return jax.value_and_grad(loss, argnums=(0, 1))(x, w)


def saved(function, *arrays):
    """Returns shapes, dtypes and bytes of what a backward pass keeps of its inputs."""
    _, vjp = jax.vjp(function, *arrays)
    leaves = [leaf for leaf in jax.tree.leaves(vjp) if hasattr(leaf, "nbytes")]
    unique = {id(leaf): leaf for leaf in leaves}
    return [leaf for leaf in unique.values() if leaf.size > 4]


@pytest.mark.parametrize(
    ("case", "recipe"),
    [("linear", recipe) for recipe in RECIPES]
    + [("weight_first", "ti2d"), ("experts", "nvfp4")],
)
def test_gradients_are_the_same(case, recipe):
    case, recipe = CASES[case], RECIPES[recipe]
    dims, lhs_shape, rhs_shape, weight = case
    lhs = jax.random.normal(jax.random.key(1), lhs_shape, jnp.bfloat16)
    rhs = jax.random.normal(jax.random.key(2), rhs_shape)
    run = jax.jit(gradients, static_argnums=(0, 1, 4))
    expected = run(recipe, dims, lhs, rhs, weight)
    got = run(packed(recipe), dims, lhs, rhs, weight)
    jax.tree.map(np.testing.assert_array_equal, got, expected)


@pytest.mark.parametrize(
    ("recipe", "ratio"),
    [
        (recipes.nvfp4(), 0.30),
        (recipes.mxfp4(), 0.30),
        (recipes.quartet2(), 0.30),
        (recipes.ufp4(Scale(UE5M3)), 0.30),
        (recipes.ufp4(), 0.40),
    ],
    ids=lambda x: "",
)
def test_bytes_saved_for_x(recipe, ratio):
    dims, x = (((1,), (0,)), ((), ())), jnp.ones((128, 64), jnp.bfloat16)
    w = jnp.ones((64, 32), jnp.bfloat16)

    def bytes_of(recipe):
        kept = saved(lambda x, w: dot_general(x, w, dims, recipe=recipe, key=KEY), x, w)
        return sum(leaf.nbytes for leaf in kept) - w.nbytes

    assert bytes_of(recipe) == x.nbytes
    assert bytes_of(packed(recipe)) <= ratio * x.nbytes


def test_siblings_share_one_copy():
    recipe, dims = packed(WGRAD["ufp4"]), (((1,), (0,)), ((), ()))
    x = jax.random.normal(jax.random.key(1), (40, 32), jnp.bfloat16)
    ws = jax.random.normal(jax.random.key(2), (3, 32, 16))

    def outputs(x, ws, shared):
        one = pack_x(x, recipe=recipe) if shared else None
        return [
            dot_general(x, w, dims, recipe=recipe, key=key, packed=one)
            for w, key in zip(ws, jax.random.split(KEY, 3), strict=True)
        ]

    def loss(x, ws, shared):
        return sum(jnp.sum(jnp.sin(y)) for y in outputs(x, ws, shared))

    run = jax.jit(jax.grad(loss, (0, 1)), static_argnums=2)
    jax.tree.map(np.testing.assert_array_equal, run(x, ws, True), run(x, ws, False))
    counts = []
    for shared in (False, True):
        kept = saved(lambda x, ws, s=shared: outputs(x, ws, s), x, ws)
        counts.append(sum(leaf.dtype == jnp.uint8 for leaf in kept))
    assert counts[0] == 3 * counts[1] > 0


def test_the_named_residual_survives_remat():
    """A checkpoint that saves by name keeps the codes and not x."""
    recipe, dims = packed(WGRAD["nvfp4"]), (((1,), (0,)), ((), ()))
    x, w = jnp.ones((32, 64), jnp.bfloat16), jnp.ones((64, 32))
    policy = jax.checkpoint_policies.save_only_these_names("fp4_residual")

    def function(x, w):
        return dot_general(jnp.tanh(x), w, dims, recipe=recipe, key=KEY)

    expected = jax.vjp(function, x, w)[1](jnp.ones((32, 32)))
    y, vjp = jax.vjp(jax.checkpoint(function, policy=policy), x, w)
    jax.tree.map(np.testing.assert_array_equal, vjp(jnp.ones_like(y)), expected)


def test_errors():
    dims, x, w = (((1,), (0,)), ((), ())), jnp.ones((16, 32)), jnp.ones((32, 8))
    recipe = packed(recipes.ufp4())
    one = pack_x(x, recipe=recipe)
    with pytest.raises(ValueError, match="packed must be None unless the recipe's"):
        gradients(recipes.ufp4(), dims, x, w, packed=one)
    with pytest.raises(ValueError, match="packed must be what pack_x makes of this x"):
        gradients(packed(recipes.nvfp4()), dims, x, w, packed=one)
    with pytest.raises(ValueError, match="pack_x: recipe must have residuals='packed'"):
        pack_x(x, recipe=recipes.ufp4())
    with pytest.raises(ValueError, match="pack_x: recipe must have .* no held amax"):
        pack_x(x, recipe=packed(recipes.ue5m3()))
    with pytest.raises(ValueError, match="residuals must be 'operands' where x is not"):
        packed(recipes.bf16())
    with pytest.raises(TypeError, match="pack_x: recipe must be a Recipe, got 'ufp4'"):
        pack_x(x, recipe="ufp4")
    with pytest.raises(TypeError, match="pack_x: x must be float32, .* dtype=int32"):
        pack_x(jnp.ones((4, 32), jnp.int32), recipe=packed(recipes.ufp4()))
