"""Held amaxes: what the backward pass writes, when, and what it leaves alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import fp4jax.nnx
from fp4jax import recipes
from fp4jax.nnx import Held

EVERY = 3
RECIPE = recipes.ue5m3(every=EVERY)
X = jax.random.normal(jax.random.key(1), (32, 64))


class Model(nnx.Module):
    """A layer called `calls` times, and one that is not."""

    def __init__(self, calls=1):
        rngs = nnx.Rngs(0)
        self.calls = calls
        self.used = nnx.Linear(64, 64, rngs=rngs)
        self.unused = nnx.Linear(64, 64, rngs=rngs)
        fp4jax.nnx.quantize_model(self, RECIPE, rngs=rngs)

    def __call__(self, x):
        for i in range(self.calls):
            x = self.used(x * (i + 1))
        return x


def loss_fn(model, x):
    return jnp.sum(model(x))


def held(layer):
    return np.asarray(layer.dot_general.held.get_value())


def differentiate(model, x, step, *, value_and_grad=fp4jax.nnx.value_and_grad):
    fp4jax.nnx.set_step(model, step)
    return value_and_grad(loss_fn)(model, x)


compiled = nnx.jit(differentiate)


def plainly_compiled(model, x, step):
    """The same under `jax.jit`."""
    graph, state = nnx.split(model)

    @jax.jit
    def run(state, x, step):
        model = nnx.merge(graph, state, copy=True)
        return differentiate(model, x, step), nnx.state(model)

    found, state = run(state, x, step)
    nnx.update(model, state)
    return found


def test_amaxes_of_all_three_operands_are_written():
    model = Model()
    assert held(model.used).tolist() == [0, 0, 0]
    compiled(model, X, 0)
    weight = model.used.kernel.get_value()
    assert held(model.used).tolist() == [
        jnp.max(jnp.abs(X)),
        jnp.max(jnp.abs(weight)),
        1,
    ]


def test_amaxes_change_at_refresh_steps_alone():
    model, changes = Model(), []
    for step in range(2 * EVERY + 1):
        before = held(model.used)
        compiled(model, X * (1 + step), step)
        changes.append(bool((held(model.used) != before).any()))
    assert changes == [step % EVERY == 0 for step in range(2 * EVERY + 1)]
    assert held(model.used)[0] == jnp.max(jnp.abs(X * (1 + 2 * EVERY)))


def test_between_refreshes_the_held_amax_decides_the_result():
    model, other = Model(), Model()
    compiled(model, X, 0)
    compiled(other, 5 * X, 0)
    losses = [float(compiled(m, X, 1)[0]) for m in (model, other)]
    assert losses[0] != losses[1]


def test_a_layer_called_twice_takes_the_maximum():
    model = Model(calls=2)
    compiled(model, X, 0)
    inputs = [jnp.max(jnp.abs(X)), jnp.max(jnp.abs(Model()(X) * 2))]
    assert inputs[0] != inputs[1]
    assert held(model.used)[0] == pytest.approx(float(max(inputs)), rel=1e-5)


def test_a_layer_without_part_keeps_its_amaxes():
    model = Model()
    kept = jnp.array([3.0, 0.0, 5.0])
    model.unused.dot_general.held.set_value(kept)
    compiled(model, X, 0)
    np.testing.assert_array_equal(held(model.unused), kept)


@pytest.mark.parametrize("run", [differentiate, plainly_compiled], ids=["eager", "jit"])
def test_every_way_to_compile_gives_the_same(run):
    ours, reference = Model(), Model()
    for step in range(2):
        found, expected = run(ours, X, step), compiled(reference, X, step)
        jax.tree.map(np.testing.assert_array_equal, found, expected)
        np.testing.assert_array_equal(held(ours.used), held(reference.used))


def test_gradients_are_of_parameters_alone():
    model = Model()
    _, grads = compiled(model, X, 0)
    found, expected = (
        nnx.to_flat_state(grads),
        nnx.to_flat_state(nnx.state(model, nnx.Param)),
    )
    assert [path for path, _ in found] == [path for path, _ in expected]
    assert held(model.used).dtype == np.float32


def test_nnx_value_and_grad_is_right_and_writes_nothing():
    model, reference = Model(), Model()
    plain = nnx.jit(
        lambda model, x, step: differentiate(
            model, x, step, value_and_grad=nnx.value_and_grad
        )
    )
    found, expected = plain(model, X, 0), compiled(reference, X, 0)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert held(model.used).tolist() == [0, 0, 0]


def test_a_forward_pass_reads_and_writes_nothing():
    model = Model()
    compiled(model, X, 0)
    before = held(model.used)
    fp4jax.nnx.set_step(model, EVERY)
    nnx.jit(lambda model: model(9 * X))(model)
    np.testing.assert_array_equal(held(model.used), before)


def test_aux_is_returned():
    model = Model()
    fp4jax.nnx.set_step(model, 0)
    with_aux = lambda model, x: (loss_fn(model, x), {"mean": jnp.mean(x)})
    (loss, aux), grads = fp4jax.nnx.value_and_grad(with_aux, has_aux=True)(model, X)
    assert float(loss) == float(compiled(Model(), X, 0)[0])
    assert float(aux["mean"]) == float(jnp.mean(X))
    assert held(model.used)[2] == 1


@pytest.mark.parametrize("recipe", [RECIPE, recipes.ufp4()], ids=["held", "fresh"])
def test_a_step_serves_one_differentiation(recipe):
    model = Model()
    fp4jax.nnx.quantize_model(model, recipe, rngs=nnx.Rngs(0))
    differentiate(model, X, 0)
    with pytest.raises(ValueError, match="set_step"):
        fp4jax.nnx.value_and_grad(loss_fn)(model, X)


def test_stacked_layers_hold_amaxes_of_their_own():
    @nnx.split_rngs(splits=2)
    @nnx.vmap
    def stack(rngs):
        return nnx.Linear(64, 64, rngs=rngs)

    model = stack(nnx.Rngs(0))
    fp4jax.nnx.quantize_model(model, RECIPE, rngs=nnx.Rngs(0))
    kernels = np.asarray(model.kernel.get_value())

    @nnx.jit
    def run(model, step):
        def loss_fn(model):
            step = lambda x, layer: layer(x)
            return jnp.sum(
                nnx.scan(step, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(X, model)
            )

        fp4jax.nnx.set_step(model, step)
        return fp4jax.nnx.value_and_grad(loss_fn)(model)

    run(model, 0)
    assert held(model).shape == (2, 3)
    np.testing.assert_array_equal(held(model)[:, 1], np.abs(kernels).max((1, 2)))
    assert held(model)[0, 0] == jnp.max(jnp.abs(X)) != held(model)[1, 0]


def test_a_recipe_that_holds_nothing_has_no_state():
    model = Model()
    fp4jax.nnx.quantize_model(
        fresh := nnx.Linear(8, 8, rngs=nnx.Rngs(0)), recipes.ufp4(), rngs=nnx.Rngs(0)
    )
    assert not jax.tree.leaves(nnx.state(fresh, Held))
    assert len(jax.tree.leaves(nnx.state(model, Held))) == 2
