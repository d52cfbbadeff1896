"""Rotary positions, the mask of documents, and attention against its formula."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from fp4jax import recipes
from fp4jax.models.attention import Attention, document_mask, rope, rotate
from tests.cases import SMALL


def rotated(x, position):
    rotation = rope(jnp.full((1, 1), position), head_dim=x.shape[-1], theta=10_000.0)
    return rotate(x[None, None, None], rotation)[0, 0, 0]


@pytest.mark.parametrize("shift", [1, 17, 4000])
def test_rope_depends_on_relative_positions_only(shift):
    query, key = jax.random.normal(jax.random.key(0), (2, 16))
    here = rotated(query, 9) @ rotated(key, 4)
    there = rotated(query, 9 + shift) @ rotated(key, 4 + shift)
    # Angles near 4000 are float32: off by 2^-13 radians.
    np.testing.assert_allclose(here, there, rtol=0, atol=2**-13 * 16)
    elsewhere = rotated(query, 9) @ rotated(key, 5)
    assert abs(here - elsewhere) > 0.1


def test_rope_rotates_each_pair_by_its_angle():
    x = jnp.arange(1.0, 9.0)
    angles = 3 * 10_000.0 ** (-np.arange(4) / 4)
    turned = (np.arange(1, 5) + 1j * np.arange(5, 9)) * np.exp(1j * angles)
    expected = np.concatenate([turned.real, turned.imag])
    np.testing.assert_allclose(rotated(x, 3), expected, rtol=1e-5)


def test_rotation_is_computed_in_float32_and_returned_in_the_dtype_of_x():
    x = jax.random.normal(jax.random.key(0), (16,)).astype(jnp.bfloat16)
    assert rotated(x, 5).dtype == jnp.bfloat16
    exact = rotated(x.astype(jnp.float32), 5).astype(jnp.bfloat16)
    np.testing.assert_array_equal(rotated(x, 5), exact)


def test_document_mask():
    mask = document_mask(jnp.array([[1, 1, 2, 0]]))[0, 0]
    expected = [[1, 1, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]]
    np.testing.assert_array_equal(mask, np.array(expected, bool))


@pytest.mark.parametrize("qk_norm", [False, True], ids=["plain", "qk_norm"])
def test_attention_equals_its_formula(qk_norm):
    sites = ("query", "key", "value", "out")
    all_bf16 = {f"attention/{site}": recipes.bf16() for site in sites}
    config = dataclasses.replace(SMALL, qk_norm=qk_norm)
    layer = Attention(config, all_bf16, rngs=nnx.Rngs(0))
    if qk_norm:
        layer.query_norm.scale[...] = jnp.linspace(0.5, 2, 16)
    x = jax.random.normal(jax.random.key(1), (2, 8, 32)).astype(jnp.bfloat16)
    segment_ids = jnp.array([[1] * 5 + [2] * 3] * 2)
    rotation = rope(
        jnp.arange(8)[None].repeat(2, 0), head_dim=16, theta=SMALL.rope_theta
    )
    y = layer(x, mask=document_mask(segment_ids), rotation=rotation)

    def heads(linear):
        return linear(x).reshape(2, 8, -1, 16)

    def normalized(x, scale):
        x = x.astype(jnp.float32)
        rms = jnp.sqrt(jnp.mean(x**2, axis=-1, keepdims=True) + config.norm_eps)
        return (x / rms * scale).astype(jnp.bfloat16)

    query, key = heads(layer.query), heads(layer.key)
    if qk_norm:
        scale = jnp.linspace(0.5, 2, 16)[None, None, None]
        query, key = normalized(query, scale), normalized(key, 1)
    query = rotate(query, rotation).astype(jnp.float32)
    key = rotate(key, rotation).astype(jnp.float32)
    value = heads(layer.value).astype(jnp.float32)
    key, value = (jnp.repeat(a, 2, axis=2) for a in (key, value))
    logits = jnp.einsum("bqhe,bkhe->bhqk", query, key, precision="highest") / 4
    seen = np.tril(np.ones((8, 8), bool)) & np.asarray(document_mask(segment_ids))
    weights = jax.nn.softmax(jnp.where(seen, logits, -jnp.inf))
    mixed = jnp.einsum("bhqk,bkhe->bqhe", weights, value, precision="highest")
    expected = mixed.reshape(2, 8, -1) @ layer.out.kernel[...]
    # Three bfloat16 roundings on the way: of the weights, of `mixed`, of y.
    np.testing.assert_allclose(y.astype(jnp.float32), expected, atol=3 * 2**-8)
