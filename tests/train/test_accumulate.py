"""The gradient over microbatches is the gradient of the batch."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from fp4jax import recipes, sharding
from fp4jax.models import Transformer
from fp4jax.policies import Policy, Rule
from fp4jax.train import OptimConfig, make_optimizer, make_state, make_train_step
from fp4jax.train import accumulate as module
from fp4jax.train.accumulate import accumulate
from tests.cases import SMALL

ONE_LAYER = dataclasses.replace(SMALL, num_layers=1)
OPTIMIZER = make_optimizer(OptimConfig(lr=0.01), steps=8)
ROWS = 4


def make_batch(rows=ROWS):
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 64, (rows, 33), dtype=np.int32)
    mask = rng.random((rows, 32)) < np.linspace(0.3, 1, rows)[:, None]
    return {
        "inputs": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "segment_ids": np.ones((rows, 32), np.int32),
        "positions": np.tile(np.arange(32, dtype=np.int32), (rows, 1)),
        "loss_mask": mask.astype(np.float32),
    }


def start(recipe, config=ONE_LAYER, layers="*"):
    policy = Policy(recipes.bf16(), (Rule(layers, recipe),))
    model = Transformer(config, policy, rngs=nnx.Rngs(0))
    return make_state(model, OPTIMIZER.transform)


@functools.cache
def compiled(graph, microbatches):
    run = functools.partial(accumulate, graph, microbatches=microbatches)
    return jax.jit(run, compiler_options={"xla_allow_excess_precision": False})


def gradients(graph, state, microbatches):
    return compiled(graph, microbatches)(state, make_batch())


def distance(tree, other):
    """Returns the largest relative distance of two arrays of two trees."""
    return max(
        float(jnp.linalg.norm(a - b) / jnp.linalg.norm(a))
        for a, b in zip(jax.tree.leaves(tree), jax.tree.leaves(other), strict=True)
    )


# Equal terms, summed in another order, may round to the next bfloat16 on the way from
# one layer to another: 2^-8 of an element at most. Other random bits of one operand
# change half of its elements by a step of the grid, a third of the largest.
CLOSE = 2**-8


@pytest.mark.parametrize("name", ["bf16", "ti2d", "ufp4"])
def test_gradients_are_those_of_the_whole_batch(name):
    graph, state = start(getattr(recipes, name)())
    loss, grads, *_ = gradients(graph, state, 1)
    parts_loss, parts_grads, *_ = gradients(graph, state, 4)
    assert float(parts_loss) == pytest.approx(float(loss), rel=1e-6)
    assert distance(grads, parts_grads) < CLOSE
    assert {g.dtype for g in jax.tree.leaves(parts_grads)} == {jnp.dtype("float32")}


@pytest.mark.parametrize("remat", ["none", "full"])
def test_rematerialization_draws_the_bits_of_the_part(remat):
    config = dataclasses.replace(ONE_LAYER, remat=remat)
    graph, state = start(recipes.ti2d(), config, layers="*/down")
    _, parts_grads, *_ = gradients(graph, state, 4)
    graph, state = start(recipes.ti2d(), layers="*/down")
    assert distance(gradients(graph, state, 1)[1], parts_grads) < CLOSE


def test_held_amaxes_serve_all_parts_and_are_the_largest_of_theirs():
    graph, state = start(recipes.ue5m3(every=2), layers="*/down")
    _, _, seen, _ = gradients(graph, state, 1)
    _, _, of_parts, _ = gradients(graph, state, 4)
    for whole, parts in zip(
        jax.tree.leaves(seen), jax.tree.leaves(of_parts), strict=True
    ):
        # x and w of the whole, within what the parts' own amaxes change upstream.
        np.testing.assert_allclose(parts[:, :2], whole[:, :2], rtol=0.25)
        np.testing.assert_array_equal(parts[:, 1], whole[:, 1])
    state = dataclasses.replace(state, held=seen, step=jnp.int32(1))
    _, grads, held, _ = gradients(graph, state, 1)
    _, parts_grads, parts_held, _ = gradients(graph, state, 4)
    assert distance(grads, parts_grads) < CLOSE
    assert distance(held, parts_held) == distance(held, seen) == 0


def test_one_step_is_that_of_the_batch():
    graph, _ = start(recipes.bf16())
    results = []
    for microbatches in (1, 2):
        step = make_train_step(graph, OPTIMIZER, microbatches=microbatches)
        state, metrics = step(start(recipes.bf16())[1], make_batch())
        assert int(state.step) == 1
        results.append(metrics)
    for name, value in results[0].items():
        assert float(results[1][name]) == pytest.approx(float(value), rel=1e-5)


def test_weights_quantized_once_give_the_same_bits(monkeypatch):
    graph, state = start(recipes.ti2d())
    once = gradients(graph, state, 4)
    monkeypatch.setattr(module, "quantize_weights", lambda model: None)
    each = jax.jit(
        functools.partial(accumulate, graph, microbatches=4),
        compiler_options={"xla_allow_excess_precision": False},
    )(state, make_batch())
    chex.assert_trees_all_equal(once, each)


@pytest.mark.parametrize("name", ["quartet2", "ue5m3"])
def test_no_weight_is_quantized_in_the_loop_over_microbatches(name, monkeypatch):
    config = dataclasses.replace(SMALL, remat="full")
    graph, state = start(getattr(recipes, name)(), config)
    kernels = {
        leaf.shape[1:]
        for path, leaf in jax.tree.leaves_with_path(state.params)
        if "kernel" in jax.tree_util.keystr(path)
    }

    def inside_and_outside():
        run = functools.partial(accumulate, graph, microbatches=3)
        program = jax.make_jaxpr(run)(state, make_batch(12))  # 128 tokens in a part
        found = list(quantized(program.jaxpr, length=3))
        return (
            sum(within and shape in kernels for shape, within in found),
            sum(not within and shape[1:] in kernels for shape, within in found),
        )

    programs = 2 if jax.tree.leaves(state.held) else 1  # which sample amaxes or do not
    assert inside_and_outside() == (0, programs * 7 * 2)
    monkeypatch.setattr(module, "quantize_weights", lambda model: None)
    inside, outside = inside_and_outside()
    assert inside >= 7 * 2 and outside == 0


def quantized(jaxpr, *, length, inside=False):
    """Yields the shapes that a program quantizes, and whether within a long scan."""
    for eqn in jaxpr.eqns:
        if eqn.params.get("name") == "fp4_quantize":
            if eqn.invars:  # differentiation leaves one of constants behind
                yield eqn.invars[0].aval.shape, inside
            continue
        in_scan = eqn.primitive.name == "scan" and eqn.params["length"] == length
        for sub in jax.tree.leaves(list(eqn.params.values()), is_leaf=is_jaxpr):
            if is_jaxpr(sub):
                sub = getattr(sub, "jaxpr", sub)
                yield from quantized(sub, length=length, inside=inside or in_scan)


def is_jaxpr(x):
    return hasattr(x, "eqns") or hasattr(x, "jaxpr")


def test_the_state_is_updated_in_its_own_memory():
    config = OptimConfig(lr=0.01, moment_dtype="bfloat16")
    optimizer = make_optimizer(config, steps=8)
    model = Transformer(ONE_LAYER, Policy(recipes.bf16()), rngs=nnx.Rngs(0))
    graph, state = make_state(model, optimizer.transform)
    step = make_train_step(graph, optimizer, microbatches=2)
    program = step.lower(state, make_batch()).compile()
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state))
    params = sum(leaf.nbytes for leaf in jax.tree.leaves(state.params))
    assert program.memory_analysis().alias_size_in_bytes == size
    assert 2 * params < size < 2.1 * params  # two moments of half the bytes
    state, metrics = program(state, make_batch())
    assert int(state.step) == 1 and np.isfinite(metrics["loss"])


def test_every_part_is_spread_over_the_mesh():
    config = dataclasses.replace(ONE_LAYER, vocab_size=80)  # a size of the logits alone
    graph, state = start(recipes.ti2d(), config, "*/up")
    mesh = sharding.make_mesh(data=2)
    _, grads, *_ = gradients(graph, state, 1)
    run = functools.partial(accumulate, graph, microbatches=2)
    options = {"xla_allow_excess_precision": False}
    whole = jax.device_put(state, NamedSharding(mesh, P()))
    inputs = whole, sharding.shard_rows(make_batch(), mesh)
    with jax.set_mesh(mesh):
        program = jax.jit(run, compiler_options=options).lower(*inputs).compile()
    assert distance(grads, program(*inputs)[1]) < CLOSE
    # Each device has one of the two rows of a part.
    assert "f32[1,32,80]" in program.as_text()
    assert "f32[2,32,80]" not in program.as_text()


@pytest.mark.parametrize("microbatches", [0, -1, 1.5, True])
def test_a_bad_number_raises(microbatches):
    graph, _ = start(recipes.bf16())
    with pytest.raises(ValueError, match="microbatches must be a positive integer"):
        make_train_step(graph, OPTIMIZER, microbatches=microbatches)


def test_rows_that_do_not_divide_raise():
    graph, state = start(recipes.bf16())
    step = make_train_step(graph, OPTIMIZER, microbatches=3)
    with pytest.raises(ValueError, match="multiple of microbatches and .* got rows=4"):
        step(state, make_batch())
