"""The NNX adapter: keys by layer and step, and the same numbers under every wrapper."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import fp4jax.nnx
from fp4jax import recipes

X = jax.random.normal(jax.random.key(1), (32, 64))


def linear(recipe, rngs):
    dot_general = fp4jax.nnx.DotGeneral(recipe, rngs=rngs)
    return nnx.Linear(64, 64, dot_general=dot_general, rngs=rngs)


class Two(nnx.Module):
    """Two layers that start from equal weights and inputs."""

    def __init__(self, recipe):
        rngs = nnx.Rngs(0)
        self.first, self.second = linear(recipe, rngs), linear(recipe, rngs)
        self.second.kernel.set_value(self.first.kernel.get_value())

    def __call__(self, x):
        return self.first(x) + self.second(x)


def gradients(model, step):
    fp4jax.nnx.set_step(model, step)
    grads = nnx.grad(lambda m: jnp.sum(m(X) ** 2))(model)
    return grads.first.kernel.get_value(), grads.second.kernel.get_value()


def jitted(model):
    graph, state = nnx.split(model)
    step = jax.jit(lambda state, step: gradients(nnx.merge(graph, state), step))
    return functools.partial(step, state)


@pytest.fixture(scope="module")
def steps():
    """The gradients of both layers at steps 0, 1 and 0 again."""
    step = jitted(Two(recipes.ufp4()))
    return [step(i) for i in (0, 1, 0)]


def test_two_steps_draw_different_noise(steps):
    for a, b in zip(steps[0], steps[1], strict=True):
        assert np.mean(np.asarray(a) != np.asarray(b)) > 0.9


def test_two_layers_draw_different_noise(steps):
    assert np.mean(np.asarray(steps[0][0]) != np.asarray(steps[0][1])) > 0.9


def test_the_same_step_draws_the_same_noise(steps):
    for a, b in zip(steps[0], steps[2], strict=True):
        np.testing.assert_array_equal(a, b)


def test_nnx_jit_gives_the_same_numbers(steps):
    ours = nnx.jit(gradients)(Two(recipes.ufp4()), 0)
    for a, b in zip(ours, steps[0], strict=True):
        np.testing.assert_array_equal(a, b)


def test_evaluation_needs_no_step():
    model = Two(recipes.ufp4())
    assert np.isfinite(nnx.jit(lambda m: m(X))(model)).all()


def test_differentiating_without_a_step_raises():
    with pytest.raises(ValueError, match="set_step"):
        nnx.grad(lambda m: jnp.sum(m(X)))(Two(recipes.ufp4()))


def test_a_recipe_that_draws_nothing_needs_no_step():
    grads = nnx.grad(lambda m: jnp.sum(m(X)))(Two(recipes.bf16()))
    assert np.isfinite(grads.first.kernel.get_value()).all()


def test_stacked_layers_have_keys_of_their_own():
    @nnx.split_rngs(splits=3)
    @nnx.vmap
    def stack(rngs):
        return linear(recipes.ufp4(), rngs)

    model = stack(nnx.Rngs(0))
    fp4jax.nnx.set_step(model, 5)
    dot = model.dot_general
    assert dot.step.get_value().tolist() == [5, 5, 5]
    words = jax.random.key_data(dot.key.get_value())
    assert len(np.unique(words, axis=0)) == 3
