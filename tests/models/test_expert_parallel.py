"""Experts that are spread over a mesh compute what one device computes."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax

import fp4jax.nnx
from experiments.collectives import collectives
from fp4jax import recipes, sharding
from fp4jax.kernels.choice import KERNELS, Kernels
from fp4jax.kernels.exchange import RAGGED
from fp4jax.models import ModelConfig, MoEConfig
from fp4jax.models.moe import MoE
from fp4jax.train.partition import spread
from tests.kernels.cases import OPAQUE
from tests.kernels.ragged import ragged_all_to_all

CONFIG = ModelConfig(
    vocab_size=64,
    num_layers=1,
    d_model=64,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    d_ff=48,
    blocks="E",
    moe=MoEConfig(num_experts=8, top_k=2, d_expert=32),
)
ROWS, LENGTH = 8, 24
SHAPE = (ROWS, LENGTH, CONFIG.d_model)
X, DY = (jax.random.normal(jax.random.key(i), SHAPE, jnp.bfloat16) for i in (0, 1))
MESHES = (
    {"data": 8},
    {"fsdp": 2, "expert": 4},
    {"expert": 8},
    {"expert": 2, "tensor": 4},
    {"data": 2, "fsdp": 2, "expert": 2},
    {"fsdp": 2, "expert": 2, "tensor": 2},
)


def layer_of(recipe):
    paths = dict.fromkeys(CONFIG.layers("E"), recipe)
    return MoE(CONFIG, paths, rngs=nnx.Rngs(0))


def make(recipe):
    """The state of a layer, and its compiled pass forward and backward."""
    graph, state = nnx.split(layer_of(recipe))

    def run(state, step, *rows):
        x, dy = (sharding.constrain(each, "batch", None, None) for each in rows)
        layer = nnx.merge(graph, spread(state), copy=True)
        fp4jax.nnx.set_step(layer, step)

        def loss(layer):
            y, balance = layer(x)
            return jnp.sum(y.astype(jnp.float32) * dy), (y, balance.loads)

        (_, found), grads = fp4jax.nnx.value_and_grad(loss, has_aux=True)(layer)
        held = nnx.state(layer, fp4jax.nnx.Held)
        return found, nnx.as_pure(spread(grads)), nnx.as_pure(held)

    options = {"xla_allow_excess_precision": False}
    return state, jax.jit(run, compiler_options=options)


@functools.cache
def whole(recipe):
    state, run = make(recipe)
    return run(state, 0, X, DY)


def compiled(recipe, **sizes):
    """Returns the result on a mesh, and the program's collectives."""
    state, run = make(recipe)
    with jax.set_mesh(sharding.make_mesh(**sizes)):
        program = run.lower(state, 0, X, DY).compile()
        return program(state, 0, X, DY), list(collectives(program.as_text()))


def check_equal(recipe, found):
    (y, loads), grads, held = found
    (expected_y, expected_loads), expected, expected_held = whole(recipe)
    np.testing.assert_array_equal(loads, expected_loads)
    # The same codes, bits and amaxes give the same terms, of float32 sums in another
    # order. What an expert returns is rounded to bfloat16 after, which may move it by
    # 2^-8 of it; other bits of a draw would move a gradient by steps of the grid.
    y, expected_y = (x.astype(jnp.float32) for x in (y, expected_y))
    np.testing.assert_allclose(y, expected_y, atol=2**-8 * jnp.abs(expected_y).max())
    for name in ("gate", "up", "down"):
        a, b = grads[name]["kernel"], expected[name]["kernel"]
        np.testing.assert_allclose(a, b, atol=2**-20 * jnp.abs(b).max(), err_msg=name)
    leaves = map(jax.tree.leaves, (held, expected_held))
    for a, b in zip(*leaves, strict=True):
        np.testing.assert_array_equal(a, b)


def test_kernels_quantize_the_tokens_of_every_device():
    recipe = recipes.ufp4()
    with KERNELS(Kernels(quantize=OPAQUE)):
        found, _ = compiled(recipe, fsdp=2, expert=2, tensor=2)
    check_equal(recipe, found)


def test_devices_gather_codes_and_compute_what_one_does():
    recipe = recipes.ti2d()
    found, sent = compiled(recipe, fsdp=2, expert=2, tensor=2)
    check_equal(recipe, found)
    gathers = [each for each in sent if each.kind == "all-gather"]
    assert {dtype for each in gathers for dtype, _ in each.arrays} == {"u8"}
    # Three matrices of the two experts of a device; codes of 4 bits and a byte for each
    # square of 32, of which program and gradient take one copy or one each.
    weights = 3 * 2 * math.prod((CONFIG.d_model, 32))
    copy = weights // 2 + weights // 32**2
    assert copy <= sum(each.bytes for each in gathers) <= 2 * copy
    scattered = [each for each in sent if each.kind == "reduce-scatter"]
    assert sum(each.bytes for each in scattered) == 4 * weights // 2
    exchanged = {each.devices for each in sent if each.kind == "all-to-all"}
    assert exchanged == {(0, 2)}  # along expert


@pytest.mark.parametrize("sizes", [{"expert": 4}, {"expert": 2, "tensor": 2}], ids=str)
@pytest.mark.parametrize("name", ["bf16", "ufp4"])
def test_tiles_that_no_token_needs_are_not_sent(name, sizes, monkeypatch):
    recipe = getattr(recipes, name)()
    monkeypatch.setattr(lax, "ragged_all_to_all", ragged_all_to_all)
    with KERNELS(Kernels(exchange=RAGGED)):
        found, _ = compiled(recipe, **sizes)
    expected, _ = compiled(recipe, **sizes)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.breadth
def test_signs_of_a_rotation_as_long_as_experts_are_many_are_whole(monkeypatch):
    moe = dataclasses.replace(CONFIG.moe, num_experts=16)
    monkeypatch.setitem(globals(), "CONFIG", dataclasses.replace(CONFIG, moe=moe))
    # What enters the gradient of x is taken from codes that are rotated.
    recipe = dataclasses.replace(recipes.ufp4(), source="fprop", dgrad=recipes.Dgrad())
    check_equal(recipe, compiled(recipe, fsdp=2, expert=4)[0])


def test_rows_that_no_mesh_divides_run_as_on_one_device():
    graph, state = nnx.split(layer_of(recipes.bf16()))
    run = jax.jit(lambda state, x: nnx.merge(graph, state)(x)[0])
    expected = run(state, X[:3])
    with jax.set_mesh(sharding.make_mesh(fsdp=2, expert=2)):
        np.testing.assert_array_equal(run(state, X[:3]), expected)


@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("name", ["ufp4", "ue5m3"])
def test_every_mesh_computes_what_one_device_does(name, sizes):
    recipe = getattr(recipes, name)()
    check_equal(recipe, compiled(recipe, **sizes)[0])


@pytest.mark.parametrize("name", ["bf16", "nvfp4", "quartet2", "mxfp4_tseng"])
def test_every_kind_of_recipe_is_spread(name):
    recipe = getattr(recipes, name)()
    check_equal(recipe, compiled(recipe, fsdp=2, expert=2, tensor=2)[0])
