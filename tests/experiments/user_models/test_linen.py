"""Linen models their authors wrote, trained in FP4 after one injected line."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import serialization
from flax.training.train_state import TrainState

from experiments.user_models.train_linen import (
    INJECTIONS,
    MODELS,
    OPTIMIZER,
    build,
    create,
    losses,
    train_step,
)
from fp4jax import recipes

RECIPES = {"ufp4": recipes.ufp4(), "ue5m3": recipes.ue5m3(every=2)}

# Without remat a program is made in half the time; a test below compares them.
FIELDS = {"gpt2": {"remat": False}, "vit": {}}


def train(name, recipe, injection):
    return losses(name, recipe, injection, steps=4, **FIELDS[name])


@pytest.fixture(scope="module", params=MODELS)
def reference(request):
    return request.param, train(request.param, None, "none")


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES)
def test_one_line_trains_in_fp4(reference, recipe):
    name, plain = reference
    found = train(name, recipe, "quantize")
    assert found == train(name, recipe, "dot_general_cls")
    assert all(map(math.isfinite, found))
    assert all(a != b for a, b in zip(found, plain, strict=True))
    assert found[-1] < found[0]


@pytest.mark.parametrize("name", MODELS)
def test_injection_changes_no_parameter_and_no_slot_of_the_optimizer(name):
    inputs, _ = MODELS[name][1](0)
    plain, *injected = (
        jax.jit(build(name, RECIPES["ue5m3"], injection, **FIELDS[name]).init)(
            jax.random.key(0), inputs
        )
        for injection in INJECTIONS
    )
    for variables in injected:
        assert plain.keys() < variables.keys()
        params = plain["params"], variables["params"]
        jax.tree.map(np.testing.assert_array_equal, *params)
        state = TrainState.create(apply_fn=None, params=variables, tx=OPTIMIZER)
        slots = OPTIMIZER.init(plain["params"]), state.opt_state
        jax.tree.map(np.testing.assert_array_equal, *slots)


def test_remat_leaves_the_losses_as_they_are():
    ours = [
        losses("gpt2", RECIPES["ue5m3"], "quantize", steps=4, remat=remat)
        for remat in (True, False)
    ]
    assert ours[0] == ours[1]


def test_saved_and_restored_training_goes_on_as_it_would_have():
    model = build("gpt2", RECIPES["ue5m3"], "quantize")
    batch = MODELS["gpt2"][1]
    state = fresh = create("gpt2", model)
    for i in range(3):
        state, _ = train_step(state, *batch(i))
    restored = serialization.from_bytes(fresh, serialization.to_bytes(state))
    restored = jax.tree.map(jnp.asarray, restored)
    (ours, our_loss), (wanted, loss) = (
        train_step(state, *batch(3)) for state in (restored, state)
    )
    assert our_loss == loss
    jax.tree.map(np.testing.assert_array_equal, ours.params, wanted.params)
