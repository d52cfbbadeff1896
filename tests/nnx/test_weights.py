"""`quantize_weights`: which layers take part, with which key, and for how long."""

import chex
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import fp4jax.nnx
from fp4jax import recipes
from fp4jax.ops.dot_general import pack_w
from fp4jax.policies import Policy, Rule

RECIPE = recipes.ti2d(block=16, sr_all=True)
X = jax.random.normal(jax.random.key(1), (32, 32))


class Scaled(nnx.Linear):
    """Multiplies by something else than its kernel."""

    def __call__(self, x):
        dims = (((x.ndim - 1,), (0,)), ((), ()))
        return self.dot_general(x, 2 * self.kernel[...], dims)


class Layers(nnx.Module):
    def __init__(self):
        rngs = nnx.Rngs(0)
        self.linear = nnx.Linear(32, 48, rngs=rngs)
        self.narrow = nnx.Linear(32, 48, dtype=jnp.bfloat16, rngs=rngs)
        self.general = nnx.LinearGeneral((4, 8), (2, 16), axis=(-2, -1), rngs=rngs)
        self.scaled = Scaled(32, 48, rngs=rngs)
        self.einsum = nnx.Einsum("bd,df->bf", (32, 48), rngs=rngs)
        self.plain = nnx.Linear(32, 48, rngs=rngs)
        shared = fp4jax.nnx.DotGeneral(recipes.mxfp8(), rngs=rngs)
        self.first = nnx.Linear(32, 32, dot_general=shared, rngs=rngs)
        self.second = nnx.Linear(32, 32, dot_general=shared, rngs=rngs)

    def __call__(self, x):
        x = self.second(self.first(x))
        general = self.general(x.reshape(-1, 4, 8)).reshape(-1, 32)
        one = (self.linear, self.narrow, self.scaled, self.einsum, self.plain)
        return sum(jnp.sum(layer(general)) for layer in one)


@pytest.fixture
def model():
    policy = Policy(
        RECIPE,
        (
            Rule("plain", recipes.bf16()),
            Rule("first", recipes.mxfp8()),
            Rule("second", recipes.mxfp8()),
        ),
    )
    model = Layers()
    fp4jax.nnx.quantize_model(model, policy, rngs=nnx.Rngs(1))
    fp4jax.nnx.set_step(model, 3)
    return model


def taking_part(model):
    return {
        layer.path
        for layer in fp4jax.nnx.layers(model)
        if layer.gemm.weight.get_value() is not None
    }


def test_layers_whose_kernel_is_known_to_be_w_take_part(model):
    assert taking_part(model) == set()
    fp4jax.nnx.quantize_weights(model)
    # Of one that two layers share, the weight of neither.
    assert taking_part(model) == {"linear", "narrow", "general"}


def test_nothing_changes_but_how_often(model):
    def gradients(model):
        return nnx.grad(lambda model: model(X))(model)

    expected = nnx.jit(gradients)(model)
    fp4jax.nnx.quantize_weights(model)
    chex.assert_trees_all_equal(nnx.jit(gradients)(model), expected)


def test_the_next_step_forgets_them(model):
    fp4jax.nnx.quantize_weights(model)
    fp4jax.nnx.set_step(model, 4)
    assert taking_part(model) == set()
    fp4jax.nnx.quantize_weights(model)
    fp4jax.nnx.value_and_grad(lambda model: model(X))(model)
    assert taking_part(model) == set()


def test_a_model_that_knows_no_step_raises(model):
    fp4jax.nnx.set_step(model, 3)
    model.linear.dot_general.step.set_value(None)
    with pytest.raises(ValueError, match="model must know its step, got none"):
        fp4jax.nnx.quantize_weights(model)


def test_stacked_layers_are_quantized_with_a_key_each():
    make = nnx.vmap(lambda rngs: nnx.Linear(32, 48, rngs=rngs))
    model = nnx.split_rngs(splits=3)(make)(nnx.Rngs(0))
    recipe = recipes.quartet2()  # draws signs, and has a tensor scale
    fp4jax.nnx.quantize_model(model, recipe, rngs=nnx.Rngs(1))
    fp4jax.nnx.set_step(model, 3)
    fp4jax.nnx.quantize_weights(model)
    found = model.dot_general.weight.get_value()
    keys = model.dot_general.key.get_value()
    for i, kernel in enumerate(model.kernel.get_value()):
        key = jax.random.fold_in(keys[i], 3)
        chex.assert_trees_all_equal(
            jax.tree.map(lambda x, i=i: x[i], found),
            pack_w(kernel, recipe=recipe, key=key),
        )
