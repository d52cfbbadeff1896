"""One compiled step: its loss, metrics, noise, and what it leaves alone."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fp4jax import policies, recipes
from fp4jax.models import Transformer
from fp4jax.policies import Policy
from fp4jax.train import (
    FP8_OPTIONS,
    OptimConfig,
    compiler_options,
    make_eval_step,
    make_optimizer,
    make_schedule,
    make_state,
    make_train_step,
)
from tests.cases import SMALL

OPTIM = OptimConfig(lr=0.01, warmup=0.5)
STEPS = 4


def make_batch(seed=0):
    rows = np.random.default_rng(seed).integers(0, 64, (2, 33), dtype=np.int32)
    return {
        "inputs": rows[:, :-1],
        "targets": rows[:, 1:],
        "segment_ids": np.repeat([[1] * 20 + [2] * 12], 2, axis=0),
        "positions": np.repeat([[*range(20), *range(12)]], 2, axis=0),
        "loss_mask": np.ones((2, 32), np.float32),
    }


class Run:
    """One compiled step, and as many equal states to start it from as asked for."""

    def __init__(self, policy):
        self.policy, self.traces = policy, 0
        self.optimizer = make_optimizer(OPTIM, steps=STEPS)._replace(schedule=self.lr)
        self.graph, _ = self.start()
        self.step = make_train_step(self.graph, self.optimizer)

    def lr(self, step):
        self.traces += 1  # the compiled step calls no Python
        return make_schedule(OPTIM, steps=STEPS)(step)

    def model(self):
        return Transformer(SMALL, self.policy(SMALL), rngs=nnx.Rngs(0))

    def start(self):
        return make_state(self.model(), self.optimizer.transform)

    def train(self):
        _, state = self.start()
        losses = []
        for seed in range(3):
            state, metrics = self.step(state, make_batch(seed))
            losses.append(float(metrics["loss"]))
        return state, losses


@pytest.fixture(scope="module")
def bf16():
    return Run(policies.bf16)


@pytest.fixture(scope="module")
def ufp4():
    return Run(policies.ufp4)


def test_the_same_seed_gives_the_same_bits_twice_and_compiles_once(ufp4):
    (state, losses), (again, losses_again) = ufp4.train(), ufp4.train()
    assert ufp4.traces == 1
    assert losses == losses_again
    chex.assert_trees_all_equal(state.params, again.params)
    chex.assert_trees_all_equal(state.opt_state, again.opt_state)


def test_two_steps_draw_different_noise(ufp4):
    norms = []
    for number in (0, 1, 1):
        _, state = ufp4.start()
        state = dataclasses.replace(state, step=jnp.int32(number))
        _, metrics = ufp4.step(state, make_batch())
        norms.append(float(metrics["grad_norm"]))
    assert norms[0] != norms[1]
    assert norms[1] == norms[2]


def test_a_step_consumes_its_state_and_keeps_what_is_not_trained(bf16):
    _, before = bf16.start()
    keys = jax.device_get(jax.tree.map(jax.random.key_data, before.rest))
    after, _ = bf16.step(before, make_batch())
    changed = jax.tree.leaves((before.step, before.params, before.opt_state))
    assert all(leaf.is_deleted() for leaf in changed)
    assert int(after.step) == 1
    chex.assert_trees_all_equal(jax.tree.map(jax.random.key_data, after.rest), keys)
    chex.assert_tree_all_finite(after.params)
    assert {leaf.dtype for leaf in jax.tree.leaves(after.params)} == {
        jnp.dtype("float32")
    }


def test_losses_fall_on_a_batch_seen_before(bf16):
    _, state = bf16.start()
    losses = []
    for _ in range(STEPS):
        state, metrics = bf16.step(state, make_batch())
        losses.append(float(metrics["loss"]))
    assert losses[-1] < losses[0] - 0.1


def test_loss_is_the_mean_over_the_mask(bf16):
    batch, model = make_batch(), bf16.model()
    batch["loss_mask"][0, 5:] = 0
    documents = {name: batch[name] for name in ("segment_ids", "positions")}
    logits = model(batch["inputs"], **documents)
    logits = np.asarray(logits, np.float64)
    log_sum = np.log(np.exp(logits).sum(axis=-1))
    chosen = np.take_along_axis(logits, batch["targets"][..., None], axis=-1)[..., 0]
    expected = (log_sum - chosen)[batch["loss_mask"] == 1].mean()
    _, state = bf16.start()
    _, metrics = bf16.step(state, batch)
    # The compiled model rounds activations at other places than the eager one.
    assert float(metrics["loss"]) == pytest.approx(expected, abs=0.01)


def test_a_masked_target_does_not_count(bf16):
    metrics = []
    for wrong in (0, 1):
        batch = make_batch()
        batch["loss_mask"][1, 7:] = 0
        batch["targets"][1, 7:] ^= wrong
        _, state = bf16.start()
        metrics.append(bf16.step(state, batch)[1])
    chex.assert_trees_all_equal(*metrics)


def test_a_batch_without_targets_is_no_division_by_zero(bf16):
    batch = make_batch() | {"loss_mask": np.zeros((2, 32), np.float32)}
    state, metrics = bf16.step(bf16.start()[1], batch)
    assert float(metrics["loss"]) == float(metrics["grad_norm"]) == 0
    chex.assert_tree_all_finite(state.params)


def test_metrics_are_those_of_the_step(bf16):
    schedule = make_schedule(OPTIM, steps=STEPS)
    _, state = bf16.start()
    for number in range(2):
        state, metrics = bf16.step(state, make_batch())
        assert set(metrics) == {"loss", "grad_norm", "lr", "skipped"}
        assert all(value.shape == () for value in metrics.values())
        assert float(metrics["lr"]) == pytest.approx(float(schedule(number)))


def test_evaluation_sums_the_losses_that_training_averages(bf16):
    batch = make_batch()
    batch["loss_mask"][0, 5:] = 0
    _, state = bf16.start()
    loss_sum = make_eval_step(bf16.graph)(state, batch)["loss_sum"]
    _, metrics = bf16.step(state, batch)
    mean = float(loss_sum) / batch["loss_mask"].sum()
    assert float(metrics["loss"]) == pytest.approx(mean, rel=1e-4)


@pytest.mark.parametrize(("compute", "options"), [("bf16", {}), ("fp8", FP8_OPTIONS)])
def test_the_compiler_is_told_of_products_in_fp8(compute, options):
    recipe = dataclasses.replace(recipes.ti2d(), compute=compute)
    make = lambda: Transformer(SMALL, Policy(recipe), rngs=nnx.Rngs(0))
    graph = nnx.graphdef(nnx.eval_shape(make))
    assert compiler_options(graph) == {"xla_allow_excess_precision": False} | options
