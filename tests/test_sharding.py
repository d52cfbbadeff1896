"""Meshes: what lies where on them, and that training does not notice."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fp4jax import recipes, sharding
from fp4jax.models import Transformer
from fp4jax.train import OptimConfig, make_optimizer, make_state, make_train_step
from tests.cases import SMALL, in_mlp_down


def test_rows_are_spread_and_state_is_whole_everywhere():
    mesh = sharding.make_mesh(data=4)
    batch = sharding.shard_rows({"inputs": np.arange(16).reshape(8, 2)}, mesh)
    assert batch["inputs"].sharding.spec == sharding.spec("batch")
    assert [s.data.shape for s in batch["inputs"].addressable_shards] == [(2, 2)] * 4
    whole = sharding.replicate({"w": jnp.ones(3)}, mesh)["w"]
    assert [s.data.shape for s in whole.addressable_shards] == [(3,)] * 4


@pytest.mark.parametrize("size", [0, 9])
def test_a_mesh_of_too_many_devices_raises(size):
    with pytest.raises(ValueError, match=f"from 1 to 8, got {size} .data={size}."):
        sharding.make_mesh(data=size)


def test_rows_that_do_not_divide_raise():
    with pytest.raises(ValueError, match="devices, 4, got 6 rows"):
        sharding.shard_rows({"inputs": np.ones((6, 2))}, sharding.make_mesh(data=4))


def test_a_step_on_a_mesh_equals_that_on_one_device_but_for_the_order_of_sums():
    optimizer = make_optimizer(OptimConfig(), steps=10)
    rows = np.random.default_rng(0).integers(0, 64, (8, 17), dtype=np.int32)
    batch = {
        "inputs": rows[:, :-1],
        "targets": rows[:, 1:],
        "segment_ids": np.ones((8, 16), np.int32),
        "positions": np.tile(np.arange(16, dtype=np.int32), (8, 1)),
        "loss_mask": np.ones((8, 16), np.float32),
    }
    config = dataclasses.replace(SMALL, num_layers=1)
    found = []
    for size in (1, 8):
        mesh = sharding.make_mesh(data=size)
        model = Transformer(config, in_mlp_down(recipes.ufp4()), rngs=nnx.Rngs(0))
        graph, state = make_state(model, optimizer.transform)
        step = make_train_step(graph, optimizer, mesh=mesh)
        state = sharding.replicate(state, mesh)
        for _ in range(2):
            state, metrics = step(state, sharding.shard_rows(batch, mesh))
        found.append((metrics["loss"].item(), metrics["grad_norm"].item()))
        for x in jax.tree.leaves(state):
            assert x.sharding.is_fully_replicated and len(x.devices()) == size
    # Gradients are summed in bfloat16 products' order; half a percent is an ulp of it.
    np.testing.assert_allclose(found[0], found[1], rtol=4e-3)
