"""Training a mixture of experts: what balances it, in parts of a batch as in one."""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fp4jax import policies, sharding
from fp4jax.models import PRESETS, MoEConfig, Transformer
from fp4jax.train import (
    OptimConfig,
    check_mesh,
    init_state,
    make_optimizer,
    make_state,
    make_train_step,
)
from fp4jax.train.guards import make_diagnosis
from tests.cases import SMALL
from tests.train.test_step import make_batch

README = Path(__file__).parents[2] / "README.md"
MOE = MoEConfig(num_experts=4, top_k=2, d_expert=16, aux_weight=0.01, bias_rate=0.125)
CONFIG = dataclasses.replace(SMALL, blocks="TE", moe=MOE)
OPTIMIZER = make_optimizer(OptimConfig(lr=0.01, warmup=0.5), steps=4)


def start(policy=policies.bf16, config=CONFIG, optimizer=OPTIMIZER):
    model = Transformer(config, policy(config), rngs=nnx.Rngs(0))
    return make_state(model, optimizer.transform)


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
    loads = nnx.jit(lambda model, x: model.forward(x).loads)(
        model, make_batch()["inputs"]
    )
    assert loads.shape == (1, 4) and loads.sum() == 2 * 32 * 2
    loads = np.asarray(loads[0])
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


def test_a_batch_of_padding_loads_no_expert(step):
    batch = make_batch()
    for name in ("segment_ids", "loss_mask"):
        batch[name] = np.zeros_like(batch[name])
    state, metrics = step(start()[1], batch)
    assert (metrics["load_max"], metrics["aux_loss"], metrics["skipped"]) == (0, 0, 0)
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


@pytest.mark.parametrize("name", ["moe_tiny", "qwen3_tiny"])
def test_small_mixtures_keep_their_experts_in_use(name):
    optimizer = make_optimizer(OptimConfig(), steps=200)
    graph, state = start(config=PRESETS[name], optimizer=optimizer)
    step, loads = make_train_step(graph, optimizer), []
    text = np.frombuffer(README.read_bytes(), np.uint8).astype(np.int32)
    starts = np.random.default_rng(0).integers(0, len(text) - 65, (80, 8, 1))
    ones = np.ones((8, 64), np.int32)
    batch = {"segment_ids": ones, "loss_mask": ones, "positions": ones.cumsum(1) - 1}
    for rows in text[starts + np.arange(65)]:
        tokens = {"inputs": rows[:, :-1], "targets": rows[:, 1:]}
        state, metrics = step(state, batch | tokens)
        loads.append(float(metrics["load_max"]))
    # All tokens to one expert is 4; a tenth of the balance leaves it above 3.9.
    assert max(loads) > 3 and max(loads[-20:]) < 3


SPREAD = dataclasses.replace(CONFIG, d_model=128, d_ff=64)
MESHES = (
    {"data": 4, "fsdp": 2},
    {"fsdp": 2, "expert": 4},
    {"fsdp": 2, "expert": 2, "tensor": 2},
)


def rows_of(batch):
    """The batch four times, each row another document of its own."""
    return {name: np.concatenate([x[:, ::-1], x] * 2) for name, x in batch.items()}


def train(mesh=None, *, microbatches=1, steps=1):
    make = lambda: Transformer(SPREAD, policies.ufp4(SPREAD), rngs=nnx.Rngs(0))
    state = init_state(make, OPTIMIZER.transform, mesh=mesh)
    graph = nnx.graphdef(nnx.eval_shape(make))
    step = make_train_step(graph, OPTIMIZER, microbatches=microbatches, mesh=mesh)
    found = []
    for seed in range(steps):
        batch = rows_of(make_batch(seed))
        if mesh is not None:
            batch = sharding.shard_rows(batch, mesh)
        state, metrics = step(state, batch)
        found.append(jax.device_get(metrics))
    return state, found


@pytest.fixture(scope="module")
def one_device():
    return train()


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_a_step_of_experts_over_a_mesh_is_that_of_one_device(sizes, one_device, capfd):
    state, (found,) = train(sharding.make_mesh(**sizes))
    assert "rematerialization" not in capfd.readouterr().err
    expected_state, (expected,) = one_device
    assert found["load_max"] == expected["load_max"]
    np.testing.assert_array_equal(bias(state), bias(expected_state))
    # The forward pass differs by sums over tensor; gradients by bfloat16's roundings.
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-4)
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=4e-3)


def test_microbatches_over_a_mesh_are_those_of_one_device(one_device):
    _, (found,) = train(sharding.make_mesh(fsdp=2, expert=2), microbatches=2)
    _, (expected,) = one_device
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-4)
    assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=4e-3)
    assert found["load_max"] == expected["load_max"]


def test_choices_without_room_are_counted_in_all_parts():
    moe = dataclasses.replace(MOE, capacity_factor=1.0)
    config = dataclasses.replace(SPREAD, moe=moe)
    make = lambda: Transformer(config, policies.bf16(config), rngs=nnx.Rngs(0))
    mesh = sharding.make_mesh(fsdp=2, expert=2)
    state = init_state(make, OPTIMIZER.transform, mesh=mesh)
    for path, x in nnx.to_flat_state(state.rest):
        if "bias" in path:  # all tokens choose the first two experts, of one device
            x.set_value(x.get_value().at[:, :2].set(9.0))
    graph = nnx.graphdef(nnx.eval_shape(make))
    step = make_train_step(graph, OPTIMIZER, microbatches=2, mesh=mesh)
    _, metrics = step(state, sharding.shard_rows(rows_of(make_batch()), mesh))
    # A row of 32 tokens needs 4 tiles of 16. There are 3: an equal share is 32 choices,
    # and the last tile of each expert may be filled by one.
    assert metrics["dropped"] == 16 * 8
    assert np.isfinite(metrics["loss"]) and metrics["skipped"] == 0


def test_a_mesh_that_does_not_divide_the_experts_raises():
    model = nnx.eval_shape(
        lambda: Transformer(SPREAD, policies.bf16(SPREAD), rngs=nnx.Rngs(0))
    )
    message = r"moe.num_experts must be a multiple of expert \* tensor = 8 .* got .*=4"
    with pytest.raises(ValueError, match=message):
        check_mesh(model, sharding.make_mesh(expert=4, tensor=2), tokens=32)
    check_mesh(model, sharding.make_mesh(fsdp=2, expert=2, tensor=2), tokens=32)


def test_the_diagnosis_of_a_step_looks_into_experts():
    graph, state = start()
    state = dataclasses.replace(state, step=jnp.int32(1))
    kernel = state.params["stacks"][1]["moe"]["down"]["kernel"]
    diagnose = make_diagnosis(graph, CONFIG)
    assert diagnose(state, make_batch()).startswith("Every operand is finite")
    # Finite, but y is not: the head's input is the first that shows it, in the loss.
    kernel.set_value(jnp.full_like(kernel.get_value(), 1e38))
    assert "finite: the loss itself is not" in diagnose(state, make_batch())
