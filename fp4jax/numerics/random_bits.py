"""Random bits of stochastic rounding: a pure function of a key and of a position.

Every backend, sharding and tile shape computes the same bits, because the bits of an
element depend on nothing but the key's two words and on where the element stands in its
operand seen as [free, contraction]:

    h = MurmurHash3_x86_32(k0, k1, row, column // 2),  seed 0
    u = low half of h on even columns, high half on odd ones

The hash and its constants are Austin Appleby's (public domain); the message is four
little-endian words.
"""

import jax
import jax.numpy as jnp

ABSORBING = _C1, _C2, _N = 0xCC9E2D51, 0x1B873593, 0xE6546B64
FINALIZING = _F1, _F2 = 0x85EBCA6B, 0xC2B2AE35
MESSAGE_BYTES = 16


def key_words(key: jax.Array, stream: int) -> tuple[jax.Array, jax.Array]:
    """Returns two uint32 words that name one stream of a key: the folded key's.

    Args:
      key: one Threefry key, typed or raw.
      stream: which of the key's independent streams.
    """
    words = jax.random.key_data(jax.random.fold_in(key, stream))
    return words[0], words[1]


def place(
    key: jax.Array, stream: int, start: tuple[jax.Array, jax.Array] | None
) -> jax.Array:
    """Returns uint32 [4]: the words of a stream, row and column of a first element.

    Args:
      key: as of `key_words`.
      stream: likewise.
      start: row and column, uint32; None: both 0.
    """
    zero = jnp.uint32(0)
    return jnp.stack([*key_words(key, stream), *(start or (zero, zero))])


def uniform16(
    words: tuple[jax.Array, jax.Array], row: jax.Array, column: jax.Array
) -> jax.Array:
    """Returns uniform uint32 in [0, 2^16) at each position.

    Args:
      words: from `key_words`.
      row: uint32 row of each element, broadcastable against `column`.
      column: uint32 column of each element.
    """
    h = _hash(words, row, column >> 1)
    return (h >> ((column & jnp.uint32(1)) << 4)) & jnp.uint32(0xFFFF)


def uniform16_pair(
    words: tuple[jax.Array, jax.Array], row: jax.Array, half_column: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns `uniform16` at columns 2 half_column and the next, hashed once."""
    h = _hash(words, row, half_column)
    return h & jnp.uint32(0xFFFF), h >> 16


def _hash(words: tuple[jax.Array, jax.Array], row: jax.Array, half_column: jax.Array):
    h = jnp.uint32(0)
    for word in (*words, row, half_column):
        h = _absorb(h, word)
    return _finalize(h)


def _rotate_left(x: jax.Array, count: int) -> jax.Array:
    return (x << count) | (x >> (32 - count))


def _absorb(h: jax.Array, word: jax.Array) -> jax.Array:
    h = h ^ _rotate_left(word * jnp.uint32(_C1), 15) * jnp.uint32(_C2)
    return _rotate_left(h, 13) * jnp.uint32(5) + jnp.uint32(_N)


def _finalize(h: jax.Array) -> jax.Array:
    h = h ^ jnp.uint32(MESSAGE_BYTES)
    h = (h ^ (h >> 16)) * jnp.uint32(_F1)
    h = (h ^ (h >> 13)) * jnp.uint32(_F2)
    return h ^ (h >> 16)
