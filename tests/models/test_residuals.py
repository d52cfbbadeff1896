"""Packed residuals: the same gradients from a fraction of the bytes, saved once."""

import dataclasses
import math
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import fp4jax.nnx
from fp4jax import recipes
from fp4jax.models import MoEConfig, Transformer
from fp4jax.models.layers import Linear
from fp4jax.numerics import E4M3, E8M0, UE5M3, Scale
from fp4jax.policies import Policy, Rule
from tests.cases import SMALL

CONFIG = dataclasses.replace(SMALL, d_ff=64, num_layers=2, remat="none")
UFP4 = recipes.ufp4()
TOKENS = np.random.default_rng(0).integers(0, 64, (2, 33), dtype=np.int32)


def packed(recipe):
    return dataclasses.replace(recipe, residuals="packed")


def split(policy, **changes):
    config = dataclasses.replace(CONFIG, **changes)
    model = Transformer(config, policy, rngs=nnx.Rngs(0))
    return nnx.split(model, nnx.Param, ...)


def loss_and_gradient(policy, **changes):
    graph, params, rest = split(policy, **changes)

    def loss(params, step):
        model = nnx.merge(graph, params, rest, copy=True)
        fp4jax.nnx.set_step(model, step)
        logits = jax.nn.log_softmax(model(TOKENS[:, :-1]))
        return -jnp.take_along_axis(logits, TOKENS[:, 1:, None], axis=-1).mean()

    options = {"xla_allow_excess_precision": False}
    return jax.jit(jax.value_and_grad(loss), compiler_options=options)(params, 0)


@pytest.mark.parametrize(
    ("recipe", "remat"),
    [(UFP4, "dots"), (recipes.nvfp4(), "none"), (recipes.ue5m3(), "none")],
    ids=["ufp4", "nvfp4", "ue5m3"],
)
def test_gradients_are_the_same_bit_for_bit(recipe, remat):
    ours, reference = (
        loss_and_gradient(Policy(each), remat=remat)
        for each in (packed(recipe), recipe)
    )
    jax.tree.map(np.testing.assert_array_equal, ours, reference)


def saved(policy, **changes):
    """Returns how many arrays of each kind the layers save, by dtype and last axis."""
    graph, params, rest = split(policy, **changes)

    def logits(params, step):
        model = nnx.merge(graph, params, rest, copy=True)
        fp4jax.nnx.set_step(model, step)
        return model(TOKENS[:, :-1])

    residuals = jax.eval_shape(
        lambda params, step: jax.vjp(lambda params: logits(params, step), params)[1],
        params,
        0,
    )
    return Counter(
        leaf.shape[-1]
        for leaf in jax.tree.leaves(residuals)
        if leaf.dtype == jnp.uint8 and leaf.shape[0] == CONFIG.num_layers
    )


EXPERTS = {
    "blocks": "E",
    "moe": MoEConfig(num_experts=4, top_k=2, d_expert=48),
}


def test_experts_save_one_copy_of_their_tokens():
    # Of x for query, key, value and for gate, up; for out; and for down.
    assert saved(Policy(packed(UFP4)), **EXPERTS) == Counter({32: 2, 64: 1, 48: 1})


@pytest.mark.parametrize("recipe", [UFP4, recipes.ti2d()], ids=["ufp4", "ti2d"])
def test_experts_have_the_same_gradients_bit_for_bit(recipe):
    ours, reference = (
        loss_and_gradient(Policy(each), **EXPERTS) for each in (packed(recipe), recipe)
    )
    jax.tree.map(np.testing.assert_array_equal, ours, reference)


@pytest.mark.parametrize("scan", [True, False], ids=["scanned", "unrolled"])
def test_siblings_save_one_copy(scan):
    # Of x for query, key, value; for gate, up; and for out, whose heads are wider.
    # F32 scales are no bytes: each is the codes of one packed operand.
    codes = saved(Policy(packed(UFP4)), scan_layers=scan)
    assert codes == Counter({32: 2, 64: 2})


@pytest.mark.parametrize(
    "key",
    [
        packed(recipes.e2m1_ref()),
        UFP4,
        packed(recipes.ufp4(seed=1)),
    ],
    ids=["another grid", "no packing", "another rotation"],
)
def test_siblings_that_quantize_otherwise_save_their_own(key):
    policy = Policy(packed(UFP4), (Rule("*/attention/key", key),))
    copies = 3 if key.residuals == "packed" else 2
    assert saved(policy) == Counter({32: 1 + copies, 64: 2})


def test_siblings_with_held_amaxes_save_their_own():
    assert saved(Policy(packed(recipes.ue5m3())))[32] == 2 * (3 + 2)  # and byte scales


@pytest.mark.parametrize(
    ("scale", "bound"),
    [
        (Scale(E4M3), 0.30),
        (Scale(UE5M3), 0.30),
        (Scale(E8M0, "truncation_free"), 0.30),
        (Scale(), 0.40),
    ],
    ids=["E4M3", "UE5M3", "E8M0", "F32"],
)
def test_a_packed_input_takes_few_bytes(scale, bound):
    recipe = packed(recipes.ufp4(scale))
    layer = Linear(64, 32, axes=("embed", "mlp"), recipe=recipe, rngs=nnx.Rngs(0))
    fp4jax.nnx.set_step(layer, 0)
    graph, state = nnx.split(layer)
    x = jnp.ones((256, 64), jnp.bfloat16)

    def apply(x, kernel):
        layer = nnx.merge(graph, state, copy=True)
        layer.kernel.set_value(kernel)
        return layer(x)

    kernel = layer.kernel.get_value()
    residuals = jax.tree.leaves(
        jax.eval_shape(lambda *a: jax.vjp(apply, *a)[1], x, kernel)
    )
    of_x = [
        leaf
        for leaf in residuals
        if leaf.size * 16 >= x.size and leaf.shape != kernel.shape
    ]
    assert {leaf.dtype.name for leaf in of_x} <= {"uint8", "float32"}
    assert (
        sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in of_x)
        <= bound * x.nbytes
    )
    assert not any(leaf.shape == x.shape for leaf in residuals)
