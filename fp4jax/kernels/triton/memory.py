"""Tiles in memory: where they lie, and which random bits belong to their elements."""

from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jax import lax

from fp4jax.numerics import random_bits

_C1, _C2, _N = (tl.constexpr(n) for n in random_bits.ABSORBING)
_F1, _F2 = (tl.constexpr(n) for n in random_bits.FINALIZING)
_MESSAGE_BYTES = tl.constexpr(random_bits.MESSAGE_BYTES)


def words(arrays: Mapping[str, jax.Array]) -> jax.Array:
    """Returns arrays of 32-bit numbers as one, uint32; where there are none, [1]."""
    if not arrays:
        return jnp.zeros(1, jnp.uint32)
    each = (lax.bitcast_convert_type(a, jnp.uint32) for a in arrays.values())
    return jnp.concatenate(list(each))


@triton.jit
def of_blocks(
    word,
    COUNT: tl.constexpr,
    FREE: tl.constexpr,
    SIZE: tl.constexpr,
    TILES: tl.constexpr,
):
    """Returns float32 of the blocks of a tile, [f, k / SIZE] or what spreads to it.

    Args:
      word: where they begin, 32-bit numbers.
      COUNT: of these: one for each row of the array, or one.
      FREE: elements of a block along the free axes.
      SIZE: of a block along the contraction axis.
      TILES: of the matrix.
    """
    row = tl.full((1, 1), 0, tl.uint32)
    if COUNT > 1:
        first = place(TILES)[0].to(tl.uint32) * TILES.tile[0]
        if TILES.axis == 1:
            row = first + FREE * tl.arange(0, TILES.tile[0] // FREE)[:, None]
            row = row.to(tl.uint32) // TILES.runs
        else:
            row = first + SIZE * tl.arange(0, TILES.tile[0] // SIZE)[None]
    found = tl.load(word + row, mask=row < COUNT, other=0)
    return found.to(tl.float32, bitcast=True)


@triton.constexpr_function
def _negative(signs: Sequence[float]) -> tuple[int, ...]:
    """Returns integers whose bits, from the lowest, say which signs are negative."""
    words = (signs[i : i + 32] for i in range(0, len(signs), 32))
    return tuple(sum((s < 0) << i for i, s in enumerate(word)) for word in words)


@triton.jit
def signs(word, SIGNS: tl.constexpr, K: tl.constexpr, SIZE: tl.constexpr):
    """Returns the signs of runs of SIZE in a row of K elements, float32 [1, K].

    Args:
      word: where they begin, if they are no constants.
      SIGNS: constants, or None.
      K: a multiple of SIZE.
      SIZE: of a run.
    """
    i = tl.arange(0, K)[None] % SIZE
    if SIGNS is None:
        return tl.load(word + i).to(tl.float32, bitcast=True)
    else:
        NEGATIVE: tl.constexpr = _negative(SIGNS)
        bits = tl.full((1, K), NEGATIVE[0], tl.uint32)
        for j in tl.static_range(1, len(NEGATIVE)):
            bits = tl.where(i // 32 == j, NEGATIVE[j], bits)
        return tl.where((bits >> (i % 32)) & 1 == 1, -1.0, 1.0)


@triton.jit
def place(TILES: tl.constexpr):
    """Returns row and column of this program's tile in the grid."""
    program = tl.program_id(0)
    return program // TILES.grid[1], program % TILES.grid[1]


@triton.jit
def load(array, TILES: tl.constexpr):
    """Returns this program's tile [f, k] of a matrix, 0 beyond it."""
    SIZE: tl.constexpr = TILES.elements(array.dtype.element_ty.primitive_bitwidth)
    first, inside, mask = _addresses(TILES, SIZE)
    return _load(array + first + inside, mask, TILES.tile[TILES.axis] // SIZE)


@triton.jit
def store(array, x, TILES: tl.constexpr):
    """Writes this program's tile [f, k] of a matrix."""
    SIZE: tl.constexpr = TILES.elements(array.dtype.element_ty.primitive_bitwidth)
    first, inside, mask = _addresses(TILES, SIZE)
    x = x.to(array.dtype.element_ty)
    _store(array + first + inside, x, mask, TILES.tile[TILES.axis] // SIZE)


@triton.jit
def _addresses(TILES: tl.constexpr, SIZE: tl.constexpr):
    """Returns where a tile begins, and where from there a piece of it lies.

    With it, which elements of the piece exist. SIZE is along the contraction axis; less
    than all where that is 1.
    """
    row, column = place(TILES)
    first_row = row.to(tl.int64) * TILES.tile[0]
    first_column = column.to(tl.int64) * TILES.tile[1]
    first = first_row * TILES.shape[1] + first_column
    if TILES.axis == 1:
        rows, columns = tl.arange(0, TILES.tile[0])[:, None], tl.arange(0, SIZE)[None]
    else:
        rows, columns = tl.arange(0, SIZE)[None], tl.arange(0, TILES.tile[1])[:, None]
    mask = (rows >= 0) & (columns >= 0)
    if not TILES.is_whole[0]:
        mask &= rows < TILES.shape[0] - first_row
    if not TILES.is_whole[1]:
        mask &= columns < TILES.shape[1] - first_column
    if TILES.is_wide:
        rows = rows.to(tl.int64)
    inside = rows * TILES.shape[1] + columns
    if TILES.width is not None:
        WIDTH: tl.constexpr = TILES.width
        inside = tl.multiple_of(inside, [WIDTH, 1])
    return first, inside, mask


@triton.jit
def _load(addresses, mask, COUNT: tl.constexpr):
    """Returns pieces beside each other."""
    if COUNT == 1:
        return tl.load(addresses, mask=mask, other=0)
    else:
        distance = COUNT // 2 * addresses.shape[1]
        first = _load(addresses, mask, COUNT // 2)
        second = _load(addresses + distance, mask, COUNT // 2)
        both = tl.permute(tl.join(first, second), (0, 2, 1))
        return tl.reshape(both, (first.shape[0], 2 * first.shape[1]))


@triton.jit
def _store(addresses, x, mask, COUNT: tl.constexpr):
    """Writes pieces that are beside each other."""
    if COUNT == 1:
        tl.store(addresses, x, mask=mask)
    else:
        both = tl.reshape(x, (x.shape[0], 2, x.shape[1] // 2))
        first, second = tl.split(tl.permute(both, (0, 2, 1)))
        distance = COUNT // 2 * addresses.shape[1]
        _store(addresses, first, mask, COUNT // 2)
        _store(addresses + distance, second, mask, COUNT // 2)


@triton.jit
def positions(TILES: tl.constexpr):
    """Returns row [f, .] and half the column [., k / 2] of pairs of elements, uint32.

    A row is an index along the free axes, a column one along the contraction axis.
    """
    row, column = place(TILES)
    first = row.to(tl.uint32) * TILES.tile[0]
    rest = column.to(tl.uint32) * TILES.tile[1]
    if TILES.axis == 1:
        pairs = tl.arange(0, TILES.tile[1] // 2)[None].to(tl.uint32) + rest // 2
        free = tl.arange(0, TILES.tile[0])[:, None].to(tl.uint32) + first
        return free // TILES.runs, free % TILES.runs * (TILES.tile[1] // 2) + pairs
    else:
        pairs = tl.arange(0, TILES.tile[0] // 2)[None].to(tl.uint32)
        free = tl.arange(0, TILES.tile[1])[:, None].to(tl.uint32) + rest
        HALF: tl.constexpr = TILES.period // 2
        if TILES.period % TILES.tile[0] == 0:  # all in one matrix
            matrix, pairs = first // TILES.period, first % TILES.period // 2 + pairs
        else:
            pairs += first // 2
            matrix, pairs = pairs // HALF, pairs % HALF
        return free + matrix * TILES.shape[1], pairs


@triton.jit
def uniform(words, tokens, TILES: tl.constexpr):
    """Returns `random_bits.uniform16` of the elements of a tile, uint32 [f, k].

    Args:
      words: address of `random_bits.place`.
      tokens: of the row or column that stands for each row of the array, or None.
      TILES: of the matrix.
    """
    row, half = positions(TILES)
    first_row, first_half = tl.load(words + 2), tl.load(words + 3) >> 1
    if tokens is None or TILES.axis == 1:
        if tokens is None:
            row += first_row
        else:
            row = _token(tokens, row, TILES)
        h = _hash(words, row, half + first_half)
        even, odd = h & 0xFFFF, h >> 16
    else:
        row += first_row
        even = _uniform16(words, row, _token(tokens, 2 * half, TILES))
        odd = _uniform16(words, row, _token(tokens, 2 * half + 1, TILES))
    return tl.reshape(tl.join(even, odd), (even.shape[0], 2 * even.shape[1]))


@triton.jit
def _token(tokens, row, TILES: tl.constexpr):
    """Returns those of rows, 0 beyond the array."""
    return tl.load(tokens + row, mask=row < TILES.shape[0] // TILES.runs, other=0)


@triton.jit
def _uniform16(words, row, column):
    h = _hash(words, row, column >> 1)
    return (h >> ((column & 1) << 4)) & 0xFFFF


@triton.jit
def _hash(words, row, half):
    h = _absorb(tl.full((1, 1), 0, tl.uint32), tl.load(words))
    h = _absorb(h, tl.load(words + 1))
    h = _absorb(_absorb(h, row), half) ^ _MESSAGE_BYTES
    h = (h ^ (h >> 16)) * _F1
    h = (h ^ (h >> 13)) * _F2
    return h ^ (h >> 16)


@triton.jit
def _absorb(h, word):
    h = h ^ _rotated_left(word * _C1, 15) * _C2
    return _rotated_left(h, 13) * 5 + _N


@triton.jit
def _rotated_left(x, COUNT: tl.constexpr):
    return (x << COUNT) | (x >> (32 - COUNT))
