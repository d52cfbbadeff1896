"""A weight that is quantized once gives the products that it gives every time."""

import functools

import chex
import jax
import jax.numpy as jnp
import pytest
from flax.linen import fp8_ops

import fp4jax
from fp4jax import recipes
from fp4jax.ops.dot_general import pack_w

KEY = jax.random.key(0)
MATMUL = (((1,), (0,)), ((), ()))
X = jax.random.normal(jax.random.key(1), (32, 48), jnp.bfloat16)
W = jax.random.normal(jax.random.key(2), (48, 40))
DY = jax.random.normal(jax.random.key(3), (32, 40), jnp.bfloat16)
HELD = jnp.array([0.0, 3.0, 4.0])
RECIPES = {
    "nvfp4": recipes.nvfp4(),
    "ti2d": recipes.ti2d(block=16, sr_all=True),  # draws for w
    "quartet2": recipes.quartet2(),  # dgrad's w is made of fprop's
    "ue5m3": recipes.ue5m3(every=2),  # holds its amax
    "bf16": recipes.bf16(),
}


def run(x, w, dy, *, recipe, step, hoist):
    step = step if recipe.holds else None
    noise = {"recipe": recipe, "key": KEY, "step": step}

    def dot(x, w, held):
        packed = pack_w(w, held=held, **noise) if hoist else None
        y_type = {"preferred_element_type": jnp.bfloat16}
        return fp4jax.dot_general(
            x, w, MATMUL, held=held, packed_w=packed, **noise, **y_type
        )

    y, vjp = jax.vjp(dot, x, w, HELD if recipe.holds else None)
    return y, *vjp(dy)


def quantized(jaxpr):
    """Returns the shapes of what a program quantizes."""
    shapes = []
    for eqn in jaxpr.eqns:
        if eqn.params.get("name") == "fp4_quantize":
            shapes.append(eqn.invars[0].aval.shape)
        for sub in jax.tree.leaves(list(eqn.params.values()), is_leaf=is_jaxpr):
            if is_jaxpr(sub):
                shapes += quantized(getattr(sub, "jaxpr", sub))
    return shapes


def is_jaxpr(x):
    return hasattr(x, "eqns") or hasattr(x, "jaxpr")


@pytest.mark.parametrize("name", RECIPES)
def test_results_are_equal_bit_for_bit(name):
    each, once = (
        jax.jit(functools.partial(run, recipe=RECIPES[name], hoist=hoist))
        for hoist in (False, True)
    )
    for step in (0, 1) if RECIPES[name].holds else (0,):  # due, and not
        results = [f(X, W, DY, step=jnp.int32(step)) for f in (each, once)]
        chex.assert_trees_all_equal(*results)


@pytest.mark.parametrize("name", ["nvfp4", "quartet2"])
def test_a_call_does_not_quantize_it_again(name):
    recipe = RECIPES[name]
    packed = pack_w(W, recipe=recipe, key=KEY)

    def loss(x, w):
        options = {"recipe": recipe, "key": KEY, "packed_w": packed}
        return jnp.sum(fp4jax.dot_general(x, w, MATMUL, **options))

    shapes = quantized(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(X, W).jaxpr)
    assert shapes and W.shape not in shapes


def test_the_gradient_is_that_of_the_weight_beside_it():
    recipe = recipes.ufp4()
    packed = pack_w(W, recipe=recipe)

    def loss(w, packed):
        options = {"recipe": recipe, "key": KEY, "packed_w": packed}
        return jnp.sum(fp4jax.dot_general(X, w, MATMUL, **options))

    dw = jax.grad(loss)(W, packed)
    assert float(jnp.abs(dw).min()) > 0
    chex.assert_trees_all_equal(dw, jax.grad(loss)(W, None))


def test_amaxes_may_be_in_the_dtype_that_combines_by_maximum():
    def loss(held):
        noise = {"recipe": RECIPES["ue5m3"], "key": KEY, "held": held, "step": 0}
        packed = pack_w(W, **noise)
        return jnp.sum(fp4jax.dot_general(X, W, MATMUL, packed_w=packed, **noise))

    @jax.jit
    def new_state(held):
        held = jax.lax.convert_element_type(held, fp8_ops.fp32_max_grad)
        new = jax.grad(loss, allow_int=True)(held)
        return jax.lax.convert_element_type(new, jnp.float32)

    chex.assert_trees_all_equal(new_state(HELD), jax.grad(loss)(HELD))


def test_what_cannot_be_honored_raises():
    recipe = recipes.ufp4()
    dot = functools.partial(fp4jax.dot_general, recipe=recipe)
    packed = pack_w(W, recipe=recipe)
    with pytest.raises(ValueError, match="packed_w must be what pack_w makes of this"):
        dot(X, W, MATMUL, packed_w=pack_w(W, recipe=recipes.ti2d()))
    with pytest.raises(ValueError, match="packed_w must be what pack_w makes of this"):
        dot(X, W.astype(jnp.bfloat16), MATMUL, packed_w=packed)
    with pytest.raises(ValueError, match="unless w is rhs and .* weight='lhs'"):
        dot(X, W, MATMUL, packed_w=packed, weight="lhs")
    batched = (((2,), (1,)), ((0,), (0,)))
    with pytest.raises(ValueError, match="no batch dimensions, .* and 1 of them"):
        dot(X[None], W[None], batched, packed_w=packed)
    with pytest.raises(ValueError, match="key must be .* to quantize the weight"):
        pack_w(W, recipe=RECIPES["ti2d"])
    with pytest.raises(ValueError, match="pack_w: held must be None for a recipe"):
        pack_w(W, recipe=recipe, held=HELD)
