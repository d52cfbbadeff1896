"""Who multiplies queries, keys and values, and what says why it is not cuDNN."""

import logging
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp4jax.models import attend as attending
from fp4jax.models.attend import attend, without_cudnn
from fp4jax.models.attention import document_mask


def device(capability, platform="gpu"):
    return types.SimpleNamespace(
        platform=platform, device_kind="a card", compute_capability=capability
    )


@pytest.fixture
def hopper(monkeypatch):
    monkeypatch.setattr(jax, "local_devices", lambda: [device("9.0")])


def test_cudnn_takes_heads_of_the_published_models(hopper):
    for size in (64, 128, 256):
        assert without_cudnn(jnp.bfloat16, length=2048, head_dim=size) is None


@pytest.mark.parametrize(
    ("dtype", "length", "head_dim", "why"),
    [
        (jnp.float32, 64, 64, "bfloat16 or float16, got float32"),
        (jnp.bfloat16, 63, 64, "an even number of tokens, got 63"),
        (jnp.bfloat16, 64, 36, "a multiple of 8 and at most 256, got 36"),
        (jnp.bfloat16, 64, 264, "a multiple of 8 and at most 256, got 264"),
    ],
)
def test_says_what_cudnn_cannot_do(hopper, dtype, length, head_dim, why):
    assert why in without_cudnn(dtype, length=length, head_dim=head_dim)


@pytest.mark.parametrize("found", [device("7.5"), device("gfx942"), jax.devices()[0]])
def test_says_what_device_cudnn_asks_for(monkeypatch, found):
    monkeypatch.setattr(jax, "local_devices", lambda: [found])
    why = without_cudnn(jnp.bfloat16, length=64, head_dim=64)
    assert f"8.0 or later, got {found.device_kind!r}" in why


def test_heads_are_smaller_before_hopper(monkeypatch):
    monkeypatch.setattr(jax, "local_devices", lambda: [device("8.0")])
    assert without_cudnn(jnp.bfloat16, length=64, head_dim=128) is None
    assert "at most 128" in without_cudnn(jnp.bfloat16, length=64, head_dim=256)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_what_can_goes_to_cudnn_and_all_else_to_xla(hopper, monkeypatch, dtype):
    asked = []

    def spy(query, *args, mask, is_causal, implementation):
        asked.append((implementation, mask is None, is_causal))
        return query

    monkeypatch.setattr(jax.nn, "dot_product_attention", spy)
    x = jnp.ones((1, 8, 2, 16), dtype)
    attend(x, x, x, mask=None)
    attend(x, x, x, mask=document_mask(jnp.ones((1, 8), jnp.int32)))
    who = "cudnn" if dtype == jnp.bfloat16 else "xla"
    assert asked == [(who, True, True), (who, False, True)]


def test_a_choice_of_xla_is_logged_once(caplog):
    attending._say.cache_clear()
    x = jnp.ones((1, 8, 2, 16), jnp.bfloat16)
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            attend(x, x, x, mask=None)
    (record,) = caplog.records
    assert "attention runs in XLA: the device must be an NVIDIA" in record.message


def test_no_mask_is_a_mask_of_one_document():
    keys = jax.random.split(jax.random.key(0), 3)
    query, key, value = (
        jax.random.normal(k, (2, 16, h, 8), jnp.bfloat16)
        for k, h in zip(keys, (4, 2, 2), strict=True)
    )
    mask = document_mask(jnp.ones((2, 16), jnp.int32))
    np.testing.assert_array_equal(
        attend(query, key, value, mask=None), attend(query, key, value, mask=mask)
    )
