"""Steps that go wrong: skipped whole, counted, and found."""

import dataclasses
import math
import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fp4jax import recipes
from fp4jax.models import Transformer
from fp4jax.train import (
    OptimConfig,
    SpikeDetector,
    guards,
    make_diagnosis,
    make_optimizer,
    make_state,
    make_train_step,
)
from tests.cases import SMALL, in_mlp_down
from tests.train.test_step import make_batch

POLICY = in_mlp_down(recipes.ue5m3())


@pytest.fixture(scope="module")
def run():
    """A compiled step, the diagnosis of its graph, and a maker of states."""
    optimizer = make_optimizer(OptimConfig(), steps=10)

    def start():
        model = Transformer(SMALL, POLICY, rngs=nnx.Rngs(0))
        return make_state(model, optimizer.transform)

    graph, _ = start()
    return (
        make_train_step(graph, optimizer),
        make_diagnosis(graph, SMALL),
        lambda: start()[1],
    )


def nan_batch():
    batch = make_batch()
    batch["loss_mask"][0, 3] = np.nan
    return batch


def counts(state):
    return [int(x) for x in (state.step, state.skipped, state.skipped_in_row)]


def with_change(state, path, change):
    """The state with the parameter at a path changed in place."""
    *nodes, name = path
    node = state.params
    for each in nodes:
        node = node[each]
    node[name].set_value(change(node[name].get_value()))
    return state


def test_a_batch_that_is_not_finite_changes_nothing_but_the_counts(run):
    step, _, start = run
    state, _ = step(start(), make_batch())
    before = jax.device_get((state.params, state.opt_state, state.held))
    state, metrics = step(state, nan_batch())
    assert int(metrics["skipped"]) == 1 and math.isnan(metrics["loss"])
    chex.assert_trees_all_equal(
        before, jax.device_get((state.params, state.opt_state, state.held))
    )
    assert counts(state) == [
        2,
        1,
        1,
    ]
    state, metrics = step(state, make_batch(1))
    assert int(metrics["skipped"]) == 0 and math.isfinite(metrics["loss"])
    assert counts(state) == [
        3,
        1,
        0,
    ]


def test_a_skipped_step_does_not_advance_the_learning_rate(run):
    step, _, start = run
    _, first = step(start(), make_batch())
    state, _ = step(start(), nan_batch())
    _, after = step(state, make_batch())
    assert after["lr"] == first["lr"]


def test_a_gradient_that_overflows_is_skipped(run):
    step, _, start = run
    huge = with_change(start(), ("norm", "scale"), lambda scale: scale * 1e22)
    before = jax.device_get(huge.params)
    state, metrics = step(huge, make_batch())
    assert math.isfinite(metrics["loss"]) and math.isinf(metrics["grad_norm"])
    assert int(metrics["skipped"]) == 1
    chex.assert_trees_all_equal(before, jax.device_get(state.params))


def test_the_first_operand_of_the_forward_pass_is_named(run):
    step, diagnose, start = run

    def overflow_layer_1(kernel):
        return kernel.at[1].set(3e38)

    path = ("stacks", 0, "mlp", "up", "kernel")
    state = with_change(start(), path, overflow_layer_1)
    state, metrics = step(state, make_batch())
    assert int(metrics["skipped"]) == 1
    found = diagnose(state, make_batch())
    assert found == "First not finite: fprop x of blocks/1/mlp/down."


def test_layers_of_a_unit_are_named_by_their_blocks():
    model = types.SimpleNamespace(places=(range(0, 4, 2), range(1, 4, 2)))
    flags = {"x": np.array([True, False])}
    assert guards._by_block("stacks/1/mlp/up", flags, model) == {
        "blocks/1/mlp/up": {"x": True},
        "blocks/3/mlp/up": {"x": False},
    }


def test_a_batch_and_parameters_are_named(run):
    step, diagnose, start = run
    state, _ = step(start(), nan_batch())
    assert diagnose(state, nan_batch()) == "Not finite in the batch: loss_mask."
    path = ("stacks", 0, "attention", "out", "kernel")
    state = with_change(start(), path, lambda x: x.at[0, 1, 2].set(jnp.inf))
    found = diagnose(dataclasses.replace(state, step=state.step + 1), make_batch())
    assert found.startswith(
        "Not finite in the parameters: stacks/0/attention/out/kernel"
    )


def test_spikes_are_told_from_noise_and_do_not_hide_each_other():
    noise = 3 + 0.1 * np.random.default_rng(0).standard_normal(500)
    detector = SpikeDetector(window=100, sigmas=8)
    assert not any([detector.update(loss) for loss in noise])
    found = [detector.update(loss) for loss in (3.1, 5.0, 3.0, 6.0, 2.0, math.nan)]
    assert found == [False, True, False, True, False, True]
    assert not any(detector.update(loss) for loss in noise)


def test_there_is_no_spike_before_the_window_is_full():
    detector = SpikeDetector(window=4)
    assert [detector.update(x) for x in (1.0, 50.0, 1.0, 1.0, 50.0)] == [False] * 4 + [
        True
    ]


@pytest.mark.parametrize("name", ["window", "sigmas"])
def test_a_window_of_nothing_is_refused(name):
    with pytest.raises(ValueError, match=f"{name} must be positive, got {name}=0"):
        SpikeDetector(**{name: 0})
