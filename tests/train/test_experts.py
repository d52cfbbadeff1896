"""Training a mixture of experts: what balances it, in parts of a batch as in one."""

import dataclasses

import numpy as np
import pytest
from flax import nnx

from fp4jax import policies
from fp4jax.models import MoEConfig, Transformer
from fp4jax.train import OptimConfig, make_optimizer, make_state, make_train_step
from tests.cases import SMALL
from tests.train.test_step import make_batch

MOE = MoEConfig(num_experts=4, top_k=2, d_expert=16, aux_weight=0.01, bias_rate=0.125)
CONFIG = dataclasses.replace(SMALL, blocks="TE", moe=MOE)
OPTIMIZER = make_optimizer(OptimConfig(lr=0.01, warmup=0.5), steps=4)


def start(policy=policies.bf16, config=CONFIG):
    model = Transformer(config, policy(config), rngs=nnx.Rngs(0))
    return make_state(model, OPTIMIZER.transform)


def bias(state):
    (found,) = (
        x.get_value() for path, x in nnx.to_flat_state(state.rest) if "bias" in path
    )
    return np.asarray(found)


@pytest.fixture(scope="module")
def step():
    return make_train_step(start()[0], OPTIMIZER)


@pytest.fixture(scope="module")
def whole(step):
    return step(start()[1], make_batch())


def test_a_step_moves_the_bias_towards_equal_loads(whole):
    state, metrics = whole
    assert {"aux_loss", "load_max"} <= set(metrics)
    graph, before = start()
    model = nnx.merge(graph, before.params, before.held, before.rest)
    output = model.forward(make_batch()["inputs"])
    assert output.loads.shape == (1, 4) and output.loads.sum() == 2 * 32 * 2
    loads = np.asarray(output.loads[0])
    # Attention across documents differs, so loads nearly agree: compare signs far off.
    moved = bias(state)[0]
    assert set(np.abs(moved)) <= {0, 0.125}
    assert moved[loads.argmax()] < 0 < moved[loads.argmin()]
    assert 1 <= metrics["load_max"] <= 4 and metrics["aux_loss"] > 0.009


def test_microbatches_sum_the_loads(whole):
    graph, before = start()
    by_parts = make_train_step(graph, OPTIMIZER, microbatches=2)
    (state, metrics), (of_parts, metrics_of_parts) = (
        whole,
        by_parts(before, make_batch()),
    )
    np.testing.assert_array_equal(bias(state), bias(of_parts))
    assert metrics["load_max"] == metrics_of_parts["load_max"]
    np.testing.assert_allclose(metrics_of_parts["loss"], metrics["loss"], rtol=1e-6)


def test_a_skipped_step_moves_nothing(step):
    batch = make_batch()
    batch["loss_mask"] *= np.float32(np.inf)
    state, metrics = step(start()[1], batch)
    assert metrics["skipped"] == 1
    np.testing.assert_array_equal(bias(state), 0)


@pytest.mark.parametrize("name", policies.PRESETS)
def test_every_policy_trains_experts(name):
    graph, state = start(policies.PRESETS[name])
    step, losses = make_train_step(graph, OPTIMIZER), []
    for _ in range(4):
        state, metrics = step(state, make_batch())
        losses.append(float(metrics["loss"]))
    assert np.isfinite(losses).all() and losses[-1] < losses[0]


def test_scan_and_remat_change_no_loss():
    losses = set()
    config = dataclasses.replace(CONFIG, num_layers=4)
    for scan, remat in ((True, "none"), (True, "dots"), (False, "full")):
        changed = dataclasses.replace(config, scan_layers=scan, remat=remat)
        graph, state = start(policies.ufp4, changed)
        _, metrics = make_train_step(graph, OPTIMIZER)(state, make_batch())
        losses.add((float(metrics["loss"]), float(metrics["grad_norm"])))
    assert len(losses) == 1
