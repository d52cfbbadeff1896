"""A run spread over a mesh: where its arrays lie, what it sends and computes."""

import dataclasses
import functools
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments.collectives import collectives
from fp4jax import policies, recipes, sharding
from fp4jax.models import MambaConfig, ModelConfig, MoEConfig, Transformer
from fp4jax.policies import Policy
from fp4jax.train import (
    Checkpoints,
    OptimConfig,
    check_mesh,
    init_state,
    make_optimizer,
    make_state,
    make_train_step,
)
from tests.cases import SMALL

CONFIG = dataclasses.replace(SMALL, num_layers=1, d_model=128, d_ff=64)
ROWS, LENGTH, STEPS = 8, 16, 20
OPTIMIZER = make_optimizer(OptimConfig(), steps=STEPS)
MESHES = (
    {"data": 8},
    {"fsdp": 8},
    {"fsdp": 4, "tensor": 2},
    {"fsdp": 4, "expert": 2},
    {"data": 2, "fsdp": 2, "tensor": 2},
)


def make_model(policy=policies.ufp4, config=CONFIG):
    return Transformer(config, policy(config), rngs=nnx.Rngs(0))


GRAPH = nnx.graphdef(nnx.eval_shape(make_model))


def make_batch(seed):
    shape = (ROWS, LENGTH + 1)
    rows = np.random.default_rng(seed).integers(0, 64, shape, dtype=np.int32)
    rows.sort()  # so that there is something to learn
    return {
        "inputs": rows[:, :-1],
        "targets": rows[:, 1:],
        "segment_ids": np.ones((ROWS, LENGTH), np.int32),
        "positions": np.tile(np.arange(LENGTH, dtype=np.int32), (ROWS, 1)),
        "loss_mask": np.ones((ROWS, LENGTH), np.float32),
    }


def train(mesh=None, *, microbatches=1, steps=STEPS):
    """Returns the state after some steps, and the metrics of each."""
    state = init_state(make_model, OPTIMIZER.transform, mesh=mesh)
    step = make_train_step(GRAPH, OPTIMIZER, microbatches=microbatches, mesh=mesh)
    found = []
    for seed in range(steps):
        batch = make_batch(seed)
        if mesh is not None:
            batch = sharding.shard_rows(batch, mesh)
        state, metrics = step(state, batch)
        found.append(jax.device_get(metrics))
    return state, found


def losses(*args, **kwargs):
    return np.array([metrics["loss"] for metrics in train(*args, **kwargs)[1]])


def test_each_device_makes_its_part_of_the_state_as_one_makes_the_whole():
    mesh = sharding.make_mesh(data=2, fsdp=2, tensor=2)
    state = init_state(make_model, OPTIMIZER.transform, mesh=mesh)
    whole = init_state(make_model, OPTIMIZER.transform, mesh=None)
    words = functools.partial(
        jax.tree.map,
        lambda x: (
            jax.random.key_data(x)
            if jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
            else np.asarray(x)
        ),
    )
    chex.assert_trees_all_equal(words(state), words(whole))
    for moments in (state.params, state.opt_state):
        sizes = [
            (x.size, x.addressable_shards[0].data.size)
            for x in jax.tree.leaves(moments)
            if x.ndim > 1 and "kernel" in str(x.sharding) or x.size > 1000
        ]
        assert sizes and all(part == size / 4 for size, part in sizes)


def test_a_step_gathers_codes_only_and_leaves_the_state_as_it_lies(capfd):
    mesh = sharding.make_mesh(data=2, fsdp=2, tensor=2)
    state = init_state(make_model, OPTIMIZER.transform, mesh=mesh)
    step = make_train_step(GRAPH, OPTIMIZER, mesh=mesh)
    batch = sharding.shard_rows(make_batch(0), mesh)
    found = list(collectives(step.lower(state, batch).compile().as_text()))
    assert "rematerialization" not in capfd.readouterr().err

    kinds = {each.kind for each in found}
    assert kinds == {"all-gather", "all-reduce", "all-to-all"}
    kernels = [x for x in jax.tree.leaves(state.params) if x.ndim == 3]
    weights = sum(math.prod(x.shape) for x in kernels) // mesh.shape["tensor"]
    head = CONFIG.vocab_size * CONFIG.d_model // mesh.shape["tensor"]
    tokens = ROWS * LENGTH // mesh.shape["data"]
    gathered = sum(each.bytes * each.times for each in found if "gather" in each.kind)
    # Forward and backward: codes of 4 bits and 32 of a scale for 16 weights, the head
    # in bfloat16; and the tokens that embeddings are looked up for.
    assert gathered == 2 * (weights * 6 // 8 + head * 2) + tokens * 4
    embedded = tokens * CONFIG.d_model // mesh.shape["fsdp"]
    sent = [each.bytes for each in found if each.kind == "all-to-all"]
    assert sent == [4 * embedded] * 2  # which a CPU sends in float32

    before = jax.tree.map(lambda x: x.sharding, state)
    state, metrics = step(state, batch)
    assert jax.tree.map(lambda x: x.sharding, state) == before
    whole, (expected,) = train(steps=1)
    # The forward pass differs by sums over tensor; gradients by bfloat16's roundings.
    assert metrics["loss"] == pytest.approx(expected["loss"], rel=1e-4)
    assert metrics["grad_norm"] == pytest.approx(expected["grad_norm"], rel=4e-3)


@pytest.mark.parametrize(
    ("sizes", "rows", "message"),
    [
        ({"tensor": 4}, ROWS, r"num_kv_heads must be .* tensor = 4 .* got .*=2"),
        ({"data": 4}, 6, "rows .* must be a multiple .* got rows=6, .* devices=4"),
        ({"data": 1}, 0, "must be a multiple .* got rows=0"),
    ],
    ids=str,
)
def test_a_step_of_what_its_mesh_does_not_divide_raises(sizes, rows, message):
    mesh = sharding.make_mesh(**sizes)
    make = lambda: make_state(make_model(), OPTIMIZER.transform)[1]
    step = make_train_step(GRAPH, OPTIMIZER, mesh=mesh)
    batch = {name: value[:rows] for name, value in make_batch(0).items()}
    with pytest.raises(ValueError, match=message):
        step.lower(jax.eval_shape(make), batch)


HYBRID = dataclasses.replace(
    CONFIG,
    num_layers=3,
    blocks="M*-",
    mlp="relu2",
    mamba=MambaConfig(num_heads=2, head_dim=32, d_state=16, chunk=8),
)
EXPERTS = dataclasses.replace(
    CONFIG, blocks="E", moe=MoEConfig(num_experts=4, top_k=2, d_expert=32, d_shared=32)
)


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        (HYBRID, {"data": 2, "fsdp": 4}),
        (HYBRID, {"fsdp": 4, "tensor": 2}),
        (EXPERTS, {"fsdp": 4, "expert": 2}),
        (EXPERTS, {"data": 2, "fsdp": 2, "expert": 2}),
    ],
    ids=lambda value: value.blocks if isinstance(value, ModelConfig) else str(value),
)
def test_no_operand_of_a_quantizer_is_gathered_in_any_family(config, sizes, capfd):
    make = functools.partial(make_model, policies.ue5m3, config)
    mesh = sharding.make_mesh(**sizes)
    state = init_state(make, OPTIMIZER.transform, mesh=mesh)
    step = make_train_step(nnx.graphdef(nnx.eval_shape(make)), OPTIMIZER, mesh=mesh)
    batch = sharding.shard_rows(make_batch(0), mesh)
    program = step.lower(state, batch).compile().as_text()
    assert "rematerialization" not in capfd.readouterr().err
    gathered = {
        array
        for each in collectives(program)
        for array in each.arrays
        if each.kind == "all-gather"
    }
    # Codes and scales, the head in bfloat16, tokens; and amaxes that experts hold.
    floats = {shape for dtype, shape in gathered if dtype not in ("u8", "u16", "s32")}
    assert all(shape[-1] == 3 for shape in floats)


@pytest.fixture(scope="module")
def one_device():
    """Losses on one device, and how far another order of sums leads from them."""
    found = losses()
    return found, np.abs(losses(microbatches=4) - found).mean()


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_a_run_depends_on_the_mesh_no_more_than_on_the_order_of_sums(sizes, one_device):
    expected, spread = one_device
    found = losses(sharding.make_mesh(**sizes))
    assert found[0] == pytest.approx(expected[0], rel=1e-4)
    # Of a single step the difference is one draw; the mean over the run is steady.
    assert np.abs(found - expected).mean() <= 3 * spread


def test_a_checkpoint_is_restored_onto_another_mesh(tmp_path):
    def make():
        axes = {"axes": ("embed", "mlp")}
        return nnx.Linear(16, 8, kernel_metadata=axes, rngs=nnx.Rngs(0))

    two, four = sharding.make_mesh(fsdp=2, tensor=2), sharding.make_mesh(fsdp=4)
    saved, like = (
        init_state(make, OPTIMIZER.transform, mesh=mesh) for mesh in (two, four)
    )
    with Checkpoints(tmp_path, config={}) as checkpoints:
        checkpoints.save(saved, data={})
        checkpoints.wait()
        found = checkpoints.restore(like).state
    kernel = found.params["kernel"].get_value()
    assert {shard.data.shape for shard in kernel.addressable_shards} == {(4, 8)}
    np.testing.assert_array_equal(kernel, saved.params["kernel"].get_value())


@pytest.mark.parametrize(
    ("sizes", "changes", "message"),
    [
        (
            {"tensor": 4},
            {},
            "num_kv_heads must be a multiple of tensor = 4 of the mesh",
        ),
        (
            {"fsdp": 8},
            {"d_model": 36},
            "d_model must be a multiple of fsdp . expert = 8",
        ),
        ({"tensor": 2}, {"vocab_size": 65}, "vocab_size=65. .* such as 66"),
        (
            {"tensor": 2},
            {"d_ff": 48},
            "k of .*mlp/down.* of 16 on a device, .* FPROP_X, got 24",
        ),
        (
            {"fsdp": 8},
            {"d_model": 64},
            "k of .*key.* multiple of 16 on a device, .*FPROP_W, got 8",
        ),
    ],
)
def test_a_mesh_that_does_not_divide_the_model_raises(sizes, changes, message):
    config = dataclasses.replace(CONFIG, **changes)
    model = nnx.eval_shape(functools.partial(make_model, config=config))
    with pytest.raises(ValueError, match=f"check_mesh: .*{message}"):
        check_mesh(model, sharding.make_mesh(**sizes), tokens=128)


def test_blocks_along_tokens_must_not_straddle_devices():
    model = nnx.eval_shape(make_model)
    with pytest.raises(ValueError, match="tokens of .* multiple of 16 .* got 8"):
        check_mesh(model, sharding.make_mesh(data=2), tokens=8)
    check_mesh(model, sharding.make_mesh(tensor=2), tokens=8)  # which pads them


def test_a_model_in_bfloat16_has_no_blocks():
    make = lambda config: Policy(recipes.bf16())
    config = dataclasses.replace(CONFIG, d_model=40)
    model = nnx.eval_shape(functools.partial(make_model, make, config))
    check_mesh(model, sharding.make_mesh(fsdp=8), tokens=3)
