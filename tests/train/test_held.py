"""Held amaxes in training: when they change, and what never touches them."""

import dataclasses
import re

import chex
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from flax import nnx

from fp4jax import recipes
from fp4jax.models import Transformer
from fp4jax.policies import Policy, Rule
from fp4jax.train import (
    OptimConfig,
    accumulate,
    make_eval_step,
    make_optimizer,
    make_state,
    make_train_step,
    step_function,
)
from tests.cases import SMALL, in_mlp_down

EVERY = 2
HOLDING = in_mlp_down(recipes.ue5m3(every=EVERY))
OPTIMIZER = make_optimizer(OptimConfig(lr=0.01), steps=8)


def start(policy=HOLDING):
    return make_state(Transformer(SMALL, policy, rngs=nnx.Rngs(0)), OPTIMIZER.transform)


def make_batch(seed=0, mask=1.0):
    rows = np.random.default_rng(seed).integers(0, 64, (2, 17), dtype=np.int32)
    return {
        "inputs": rows[:, :-1],
        "targets": rows[:, 1:],
        "segment_ids": np.ones((2, 16), np.int32),
        "positions": np.tile(np.arange(16, dtype=np.int32), (2, 1)),
        "loss_mask": np.full((2, 16), mask, np.float32),
    }


@pytest.fixture(scope="module")
def step():
    return make_train_step(start()[0], OPTIMIZER)


def test_amaxes_change_at_refresh_steps_alone(step):
    _, state = start()
    changes = []
    for number in range(2 * EVERY + 1):
        before = jax.device_get(state.held)
        state, _ = step(state, make_batch(number))
        pairs = zip(jax.tree.leaves(before), jax.tree.leaves(state.held), strict=True)
        changes.append({bool((a != b).all()) for a, b in pairs})
    # In both blocks, in x, w and dy.
    assert changes == [{number % EVERY == 0} for number in range(2 * EVERY + 1)]
    assert [leaf.shape for leaf in jax.tree.leaves(state.held)] == [(2, 3)]


@pytest.mark.parametrize(("every", "conditions"), [(1, 0), (EVERY, 1)])
def test_a_step_has_at_most_one_condition(every, conditions):
    graph, state = start(in_mlp_down(recipes.ue5m3(every=every)))
    step = make_train_step(graph, OPTIMIZER)
    text = step.lower(state, make_batch()).compile().as_text()
    assert len(re.findall(r" conditional\(", text)) == conditions


@pytest.mark.breadth
def test_runs_side_by_side_have_one_condition():
    graph, state = start()
    runs = jax.tree.map(lambda x: jnp.stack([x, x]), state)
    steps = jax.vmap(step_function(graph, OPTIMIZER), in_axes=(0, None))
    text = jax.jit(steps).lower(runs, make_batch()).compile().as_text()
    assert len(re.findall(r" conditional\(", text)) == 1


@pytest.mark.parametrize(
    "microbatches", [1, pytest.param(2, marks=pytest.mark.breadth)]
)
def test_one_condition_changes_no_bit(microbatches, monkeypatch):
    def trained():
        graph, state = start()
        step = make_train_step(graph, OPTIMIZER, microbatches=microbatches)
        for number in range(EVERY + 2):
            state, metrics = step(state, make_batch(number))
        return state, metrics

    found = trained()
    monkeypatch.setattr(accumulate, "under_one_condition", lambda _, f: f())
    chex.assert_trees_all_equal(found, trained())


def test_an_amax_of_zero_is_due_off_the_step(step):
    _, state = start()
    state, _ = step(state, make_batch(mask=0.0))  # dy are zeros
    before = jax.device_get(jax.tree.leaves(state.held))
    state, _ = step(state, make_batch(1))
    for old, new in zip(before, jax.tree.leaves(state.held), strict=True):
        np.testing.assert_array_equal(new[:, :2], old[:, :2])
        assert (old[:, 2] == 0).all() and (new[:, 2] > 0).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_step_that_is_not_finite_leaves_them_alone(step, bad):
    _, state = start()
    state, _ = step(state, make_batch())
    before = jax.device_get(state.held)
    state = dataclasses.replace(state, step=jnp.int32(EVERY))
    state, metrics = step(state, make_batch(1, mask=bad))
    assert not np.isfinite(float(metrics["grad_norm"]))
    chex.assert_trees_all_equal(jax.device_get(state.held), before)


def test_a_finite_loss_with_a_gradient_that_is_not_leaves_them_alone(step):
    _, state = start()
    state, _ = step(state, make_batch())
    before = jax.device_get(state.held)
    huge = jax.tree.map(lambda x: x, state.params)
    huge.embed.embedding.set_value(state.params.embed.embedding.get_value() * 1e38)
    state = dataclasses.replace(state, params=huge, step=jnp.int32(EVERY))
    state, metrics = step(state, make_batch(1))
    assert not np.isfinite([float(metrics["loss"]), float(metrics["grad_norm"])]).all()
    chex.assert_trees_all_equal(jax.device_get(state.held), before)


def test_the_optimizer_never_sees_them():
    _, holding = start()
    _, plain = start(in_mlp_down(recipes.ufp4()))
    for ours, theirs in (
        (holding.params, plain.params),
        (holding.opt_state, plain.opt_state),
    ):
        chex.assert_trees_all_equal_structs(ours, theirs)
    assert not jax.tree.leaves(plain.held)


def test_evaluation_reads_and_does_not_refresh(step):
    graph, state = start()
    state, _ = step(state, make_batch())
    state = dataclasses.replace(state, step=jnp.int32(EVERY))
    evaluate = make_eval_step(graph)
    loss = float(evaluate(state, make_batch(1))["loss_sum"])
    far = dataclasses.replace(state, held=jax.tree.map(lambda x: 1.3 * x, state.held))
    assert float(evaluate(far, make_batch(1))["loss_sum"]) != loss


def test_state_resumes_bit_for_bit(step, tmp_path):
    _, state = start()
    for number in range(EVERY + 1):
        state, _ = step(state, make_batch(number))
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        restored = checkpointer.restore(tmp_path / "state", state)
    chex.assert_trees_all_equal(restored.held, state.held)
    results = [step(s, make_batch(9)) for s in (state, restored)]
    chex.assert_trees_all_equal(*[(s.params, s.held, m) for s, m in results])


def test_the_state_of_another_recipe_raises(step):
    _, state = start(in_mlp_down(recipes.ufp4()))
    with pytest.raises(ValueError, match="state must be that of its recipe"):
        step(state, make_batch())


def test_layers_whose_recipe_holds_nothing_have_no_amaxes():
    rule = Rule("*/mlp/down", recipes.ue5m3())
    _, state = start(Policy(recipes.ufp4(), (rule,)))
    assert [leaf.shape for leaf in jax.tree.leaves(state.held)] == [(2, 3)]
