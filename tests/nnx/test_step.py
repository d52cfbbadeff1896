"""`set_step`: what it writes, and the ways in which noise would repeat."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import fp4jax.nnx
from fp4jax import recipes

X = jax.random.normal(jax.random.key(1), (16, 32))


class Pair(nnx.Module):
    """Two linear layers that share what computes their products."""

    def __init__(self, recipe):
        rngs = nnx.Rngs(0)
        dot = fp4jax.nnx.DotGeneral(recipe, rngs=rngs)
        self.first = nnx.Linear(32, 32, dot_general=dot, rngs=rngs)
        self.second = nnx.Linear(32, 32, dot_general=dot, rngs=rngs)


def test_a_dot_general_of_two_layers_raises():
    with pytest.raises(ValueError, match="of its own.* got one for first, second"):
        fp4jax.nnx.set_step(Pair(recipes.ufp4()), 0)


def test_a_dot_general_that_draws_nothing_may_be_shared():
    model = Pair(recipes.bf16())
    fp4jax.nnx.set_step(model, 4)
    assert int(model.first.dot_general.step.get_value()) == 4


def test_attention_may_hand_on_what_one_layer_uses():
    rngs = nnx.Rngs(0)
    dot = fp4jax.nnx.DotGeneral(recipes.ufp4(), rngs=rngs)
    options = {"decode": False, "rngs": rngs}
    model = nnx.MultiHeadAttention(2, 32, out_dot_general=dot, **options)
    fp4jax.nnx.set_step(model, 4)
    assert int(model.out.dot_general.step.get_value()) == 4
    model = nnx.MultiHeadAttention(2, 32, qkv_dot_general=dot, **options)
    with pytest.raises(ValueError, match="got one for key, query, value"):
        fp4jax.nnx.set_step(model, 4)


def test_a_stack_with_one_key_raises():
    stack = nnx.vmap(lambda rngs: nnx.Linear(32, 32, rngs=rngs))
    model = nnx.split_rngs(splits=3)(stack)(nnx.Rngs(0))
    one = fp4jax.nnx.DotGeneral(recipes.ufp4(), rngs=nnx.Rngs(0))
    model.dot_general = nnx.data(one)
    with pytest.raises(ValueError, match=r"got keys of shape \(\) at .* \(3,\)"):
        fp4jax.nnx.set_step(model, 0)
    three = fp4jax.nnx.DotGeneral(recipes.ufp4(), rngs=nnx.Rngs(0), stack=(3,))
    model.dot_general = three
    fp4jax.nnx.set_step(model, 0)


@pytest.mark.parametrize("jit", [jax.jit, nnx.jit], ids=["jax.jit", "nnx.jit"])
def test_a_step_that_a_program_would_hold_constant_raises(jit):
    graph, state = nnx.split(
        nnx.Linear(
            32,
            32,
            dot_general=fp4jax.nnx.DotGeneral(recipes.ufp4(), rngs=nnx.Rngs(0)),
            rngs=nnx.Rngs(0),
        )
    )

    def gradient(state, step):
        model = nnx.merge(graph, state, copy=True)
        fp4jax.nnx.set_step(model, step)
        return nnx.grad(lambda model: jnp.sum(model(X) ** 2))(model)

    with pytest.raises(ValueError, match="an argument of the compiled.* step=3"):
        jit(lambda state: gradient(state, 3))(state)
    found = [jit(gradient)(state, i)["kernel"] for i in range(2)]
    assert np.mean(np.asarray(found[0]) != np.asarray(found[1])) > 0.9


@pytest.mark.parametrize("step", [1.0, True, np.arange(2)], ids=repr)
def test_a_step_that_is_no_integer_scalar_raises(step):
    with pytest.raises(TypeError, match="step must be an integer scalar"):
        fp4jax.nnx.set_step(Pair(recipes.bf16()), step)


@pytest.mark.parametrize("microbatch", [1.0, True, np.arange(2)], ids=repr)
def test_a_microbatch_that_is_no_integer_scalar_raises(microbatch):
    with pytest.raises(TypeError, match="microbatch must be an integer scalar"):
        fp4jax.nnx.set_step(Pair(recipes.bf16()), 0, microbatch=microbatch)


def test_a_step_without_a_microbatch_is_of_the_whole_batch():
    make = nnx.vmap(lambda rngs: nnx.Linear(32, 32, rngs=rngs))
    model = nnx.split_rngs(splits=3)(make)(nnx.Rngs(0))
    fp4jax.nnx.quantize_model(model, recipes.ufp4(), rngs=nnx.Rngs(1))
    dot = model.dot_general
    fp4jax.nnx.set_step(model, 0, microbatch=2)
    assert dot.microbatch.get_value().tolist() == [2, 2, 2]
    fp4jax.nnx.set_step(model, 1)
    assert dot.microbatch.get_value() is None
