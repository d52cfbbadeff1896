"""The router: what it chooses, how it weighs, and what keeps experts equally loaded."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fp4jax.models import MoEConfig
from fp4jax.models.router import Router

CONFIG = MoEConfig(num_experts=4, top_k=2, d_expert=8)
X = jax.random.normal(jax.random.key(0), (2, 6, 16), jnp.bfloat16)


def router(**changes):
    return Router(dataclasses.replace(CONFIG, **changes), 16, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalize", [True, False])
def test_a_token_goes_to_the_highest_scores(score, normalize):
    found = router(score=score, normalize=normalize, scaling=2.5)
    routing = found(X)
    logits = np.asarray(X, np.float64) @ np.asarray(found.kernel[...], np.float64)
    scores = np.exp(logits) if score == "softmax" else 1 / (1 + np.exp(-logits))
    if score == "softmax":
        scores /= scores.sum(-1, keepdims=True)
    order = np.argsort(-scores, -1)[..., :2]
    np.testing.assert_array_equal(routing.experts, order)
    expected = np.take_along_axis(scores, order, -1)
    if normalize:
        expected /= expected.sum(-1, keepdims=True)
    # float32: exp and a sum of 16 products, each within 2^-23 of values up to 8.
    np.testing.assert_allclose(routing.weights, 2.5 * expected, rtol=2**-18)
    np.testing.assert_array_equal(
        routing.loads, np.bincount(order.ravel(), minlength=4)
    )


def test_the_auxiliary_loss_is_1_where_experts_are_used_equally():
    found = router()
    found.kernel[...] = jnp.eye(16)[:, :4] * 20
    even = jnp.eye(16)[None, [0, 1, 2, 3]] + jnp.eye(16)[None, [1, 2, 3, 0]]
    one = jnp.broadcast_to(even[:, :1], even.shape)
    of = jax.jit(jax.value_and_grad(lambda x: found(x).aux_loss))
    np.testing.assert_allclose(of(even)[0], 1, rtol=1e-6)
    np.testing.assert_allclose(of(one)[0], 2, rtol=1e-6)  # 4 of (1/2 1/2) 2
    assert jnp.abs(of(one + 0.1 * even)[1]).max() > 0


def test_tokens_of_padding_are_not_counted():
    counts = jnp.arange(6)[None] < jnp.array([[4], [0]])
    padding = jnp.where(counts[..., None], X, jnp.nan)
    of = jax.jit(lambda x, counts: router()(x, counts=counts))
    found, expected = of(padding, counts), router()(X[:1, :4])
    np.testing.assert_array_equal(found.loads, expected.loads)
    np.testing.assert_allclose(found.aux_loss, expected.aux_loss, rtol=1e-6)
    none = of(X, jnp.zeros((2, 6), bool))
    assert none.aux_loss == 0 and not none.loads.any()


def test_a_bias_moves_the_choice_and_no_weight():
    found = router(bias_rate=0.5)
    plain = found(X)
    found.bias[...] = jnp.float32([9, 9, 0, 0])
    moved = found(X)
    assert set(np.unique(moved.experts)) == {0, 1}
    assert moved.weights.max() <= 1 and (moved.weights != plain.weights).any()
    grads = nnx.grad(lambda r: jnp.sum(r(X).weights ** 2))(found)
    assert list(grads) == ["kernel"]
    found.move_bias(jnp.array([6, 2, 4, 4]))
    np.testing.assert_array_equal(found.bias[...], [8.5, 9.5, 0, 0])
    without = router()
    without.move_bias(jnp.array([6, 2, 4, 4]))
    assert without.bias.get_value() is None
