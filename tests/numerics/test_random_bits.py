"""Streams of a key, and bits as a function of position alone."""

import jax
import jax.numpy as jnp
import numpy as np

from fp4jax.numerics import random_bits
from tests.numerics.cases import KEY

key_words = jax.jit(random_bits.key_words)
uniform16 = jax.jit(random_bits.uniform16)
WORDS = jnp.uint32(7), jnp.uint32(11)


def test_typed_and_raw_keys_name_the_same_streams():
    typed, raw = jax.random.key(5), jax.random.PRNGKey(5)
    for stream in (0, 10):
        assert key_words(typed, stream) == key_words(raw, stream)


def test_every_key_and_stream_has_its_own_words():
    keys = [KEY, jax.random.key(1), jax.random.fold_in(KEY, 1)]
    words = {
        tuple(map(int, key_words(key, stream))) for key in keys for stream in range(11)
    }
    assert len(words) == len(keys) * 11


def test_bits_depend_on_the_position_alone():
    row = jnp.arange(6, dtype=jnp.uint32)[:, None]
    column = jnp.arange(10, dtype=jnp.uint32)[None]
    bits = uniform16(WORDS, row, column)
    assert bits.shape == (6, 10) and bits.dtype == jnp.uint32
    assert np.all(np.asarray(bits) < 2**16)
    part = uniform16(WORDS, row[2:5], column[:, 3:])
    np.testing.assert_array_equal(part, bits[2:5, 3:])
    by_row = jax.vmap(lambda i: random_bits.uniform16(WORDS, i, column[0]))(row[:, 0])
    np.testing.assert_array_equal(by_row, bits)


def test_positions_of_all_32_bits_count():
    one = jnp.uint32(1)
    high = jnp.uint32(2**31)
    bits = [
        int(uniform16(WORDS, row, column)[0])
        for row, column in (
            (jnp.array([one]), jnp.array([one])),
            (jnp.array([one | high]), jnp.array([one])),
            (jnp.array([one]), jnp.array([one | high])),
        )
    ]
    assert len(set(bits)) == 3
