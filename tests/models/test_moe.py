"""A mixture of experts, against a loop over its experts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import fp4jax.nnx
from fp4jax import recipes
from fp4jax.models import ModelConfig, MoEConfig
from fp4jax.models.moe import MoE

CONFIG = ModelConfig(
    vocab_size=64,
    num_layers=1,
    d_model=32,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    d_ff=48,
    blocks="E",
    moe=MoEConfig(num_experts=4, top_k=2, d_expert=16),
)
X = jax.random.normal(jax.random.key(0), (2, 24, 32), jnp.bfloat16)


def moe(recipe, config=CONFIG):
    paths = dict.fromkeys(config.layers("E"), recipe)
    return MoE(config, paths, rngs=nnx.Rngs(0))


def with_experts(**changes):
    return dataclasses.replace(CONFIG, moe=dataclasses.replace(CONFIG.moe, **changes))


def by_loop(layer, x, config=CONFIG):
    """Every expert sees every token; its result counts by the weight of the token."""
    routing = layer.router(x)
    weights = jnp.sum(
        jax.nn.one_hot(routing.experts, config.moe.num_experts)
        * routing.weights[..., None],
        2,
    )
    total = 0.0
    for i in range(config.moe.num_experts):
        product = lambda x, w, i=i: jnp.einsum(
            "btk,kn->btn", x, w[...][i].astype(jnp.bfloat16)
        )
        up = product(x, layer.up.kernel)
        if layer.gate is None:
            hidden = jax.nn.relu(up) ** 2
        else:
            hidden = jax.nn.silu(product(x, layer.gate.kernel)) * up
        y = product(hidden, layer.down.kernel)
        total += weights[:, :, i, None] * y.astype(jnp.float32)
    return total


def loss(layer, forward):
    return jnp.mean(forward(layer, X).astype(jnp.float32) ** 2)


@pytest.mark.parametrize("mlp", ["swiglu", "relu2"])
def test_values_and_gradients_are_those_of_a_loop(mlp):
    config = dataclasses.replace(CONFIG, mlp=mlp)
    layer = moe(recipes.bf16(), config)

    @nnx.jit
    def both(layer):
        plain = lambda layer, x: layer(x)[0]
        forwards = (plain, lambda layer, x: by_loop(layer, x, config))
        return [nnx.value_and_grad(loss)(layer, f) for f in forwards]

    (found, grads), (expected, of_loop) = both(layer)
    # Activations are rounded to bfloat16 between products, in the same places but for
    # the last sum: 2^-9 of a value each, of which the loss averages many.
    np.testing.assert_allclose(found, expected, rtol=2**-8)
    for path, a in nnx.to_flat_state(grads):
        b = of_loop[path[0]] if len(path) == 1 else of_loop[path[0]][path[1]]
        a, b = a.get_value(), b.get_value()
        assert jnp.linalg.norm(a - b) <= 2**-6 * jnp.linalg.norm(b), path


def test_every_token_may_choose_one_expert():
    layer = moe(recipes.bf16(), with_experts(top_k=1))
    layer.router.kernel[...] = jnp.zeros((32, 4)).at[:, 2].set(1.0)

    @nnx.jit
    def run(layer):
        def loss(layer):
            y, balance = layer(jnp.abs(X))
            return jnp.sum(y.astype(jnp.float32)), balance

        return nnx.grad(loss, has_aux=True)(layer)

    grads, balance = run(layer)
    np.testing.assert_array_equal(balance.loads, [0, 0, 48, 0])
    for name in ("gate", "up", "down"):
        of_experts = jnp.abs(grads[name]["kernel"][...]).max((1, 2))
        np.testing.assert_array_equal(of_experts > 0, [False, False, True, False])


def test_a_shared_expert_sees_every_token():
    layer = moe(recipes.bf16(), with_experts(d_shared=16))

    @nnx.jit
    def both(layer):
        y, _ = layer(X)
        of_experts, _ = layer._routed(X, layer.router(X))
        return y, of_experts + layer.shared(X)

    np.testing.assert_array_equal(*both(layer))


@pytest.mark.parametrize("name", ["ti2d", "ufp4"])
def test_rows_are_the_same_in_any_part_of_a_batch(name):
    """Blocks along tokens and random bits do not depend on the other rows."""
    layer = moe(getattr(recipes, name)())

    @nnx.jit
    def gradients(layer, x, step, microbatch=None):
        fp4jax.nnx.set_step(layer, step, microbatch=microbatch)
        loss = lambda layer, x: jnp.sum(layer(x)[0].astype(jnp.float32))
        of_layer = nnx.value_and_grad(loss)(layer, x)[1]
        return of_layer, layer(x)[0]

    whole, y = gradients(layer, X, 0)
    parts = [gradients(layer, X[i : i + 1], 0, jnp.int32(i)) for i in range(2)]
    np.testing.assert_array_equal(jnp.concatenate([p[1] for p in parts]), y)
    sums = jax.tree.map(jnp.add, parts[0][0], parts[1][0])
    for name in ("gate", "up", "down"):
        a, b = sums[name]["kernel"][...], whole[name]["kernel"][...]
        # Equal terms, whose float32 sums over two parts are in another order.
        np.testing.assert_allclose(a, b, atol=2**-18 * jnp.abs(b).max(), err_msg=name)
