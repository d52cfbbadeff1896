"""Blocks: how an array is padded, split into blocks that share a scale, and joined."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax

from fp4jax.numerics import exact


def pad_to_multiple(x: jax.Array, multiples: dict[int, int]) -> jax.Array:
    """Zero-pads axes at their end.

    Args:
      x: any array.
      multiples: for some axes, a number that their size must become a multiple of.

    Returns:
      Array of the dtype of `x`.
    """
    widths = [(0, -size % multiples.get(i, 1), 0) for i, size in enumerate(x.shape)]
    if all(high == 0 for _, high, _ in widths):
        return x
    return lax.pad(x, jnp.zeros((), x.dtype), widths)


def split_axis(x: jax.Array, axis: int, size: int) -> jax.Array:
    """Splits an axis of n size elements in two, [n, size]."""
    n = x.shape[axis] // size
    return x.reshape(*x.shape[:axis], n, size, *x.shape[axis + 1 :])


def join_axes(x: jax.Array, axis: int) -> jax.Array:
    """Joins the axis with the next: the inverse of `split_axis`."""
    size = x.shape[axis] * x.shape[axis + 1]
    return x.reshape(*x.shape[:axis], size, *x.shape[axis + 2 :])


@dataclasses.dataclass(frozen=True)
class Tiling:
    """The blocks of an array: an axis of n b elements becomes two, [n, b].

    Attributes:
      shape: of the array.
      sizes: block size b by axis.
    """

    shape: tuple[int, ...]
    sizes: dict[int, int]

    @property
    def padded(self) -> tuple[int, ...]:
        """The shape in whole blocks."""
        return tuple(n + -n % self.sizes.get(i, 1) for i, n in enumerate(self.shape))

    @property
    def inside(self) -> tuple[int, ...]:
        """The axes of a split array that run inside a block."""
        return tuple(axis + i + 1 for i, axis in enumerate(sorted(self.sizes)))

    def split(self, x: jax.Array) -> jax.Array:
        """Zero-pads an array of this shape to whole blocks and splits its axes."""
        x = pad_to_multiple(x, self.sizes)
        # One at a time: a reshape of two sharded axes has no evident sharding.
        for axis in sorted(self.sizes, reverse=True):
            x = split_axis(x, axis, self.sizes[axis])
        return x

    def join(self, x: jax.Array) -> jax.Array:
        """Joins split axes and cuts the padding: the inverse of `split`."""
        for axis in sorted(self.sizes):
            x = join_axes(x, axis)
        return x[tuple(slice(n) for n in self.shape)]


def amax(x: jax.Array, axes: tuple[int, ...] | None = None) -> jax.Array:
    """Returns max |x| in float32, axes kept: 0 if empty, NaN where any element is.

    Taken of the bit patterns, whose order as integers is that of the magnitudes with
    NaN above all: a compiler's maximum of floats may lose a NaN.
    """
    bits = exact.magnitude_bits_of(x.astype(jnp.float32))
    largest = jnp.max(bits, axis=axes, keepdims=axes is not None, initial=0)
    return exact.float_of(largest)


def positions(
    tiling: Tiling,
    axis: int,
    start: tuple[jax.Array, jax.Array] | None = None,
    tokens: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns row and column of every element of an array seen as [free, contraction].

    The row is the row-major index over all axes but the contraction axis, counted
    before padding.

    Args:
      tiling: of the array.
      axis: the contraction axis.
      start: uint32 row and column of the first element, in an array that has this one
        as a part; None is (0, 0).
      tokens: uint32 [t, a], of an array whose first two axes hold tokens and the last
        or `axis` their features, the token at each: its row, or column if `axis` is 1,
        whatever `start` says of these.

    Returns:
      (row, column), uint32 arrays that broadcast to `tiling.padded`.

    Raises:
      ValueError: an index would not fit 32 bits.
    """
    shape = tiling.shape
    free = [dim for dim in range(len(shape)) if dim != axis]
    if max(math.prod(shape[dim] for dim in free), shape[axis]) > 2**32:
        raise ValueError(
            "positions: an operand must have at most 2^32 rows and columns, got "
            f"shape={shape} with contraction axis {axis}."
        )

    def index(dim: int) -> jax.Array:
        size = [n if i == dim else 1 for i, n in enumerate(tiling.padded)]
        return lax.broadcasted_iota(jnp.uint32, size, dim)

    if tokens is not None:
        token = lax.expand_dims(tokens, tuple(range(2, len(shape))))
        row, column = start or (jnp.uint32(0), jnp.uint32(0))
        if axis == 1:
            return index(len(shape) - 1) + row, token
        return token, index(axis) + column
    row = jnp.zeros([1] * len(shape), jnp.uint32)
    stride = 1
    for dim in reversed(free):
        row = row + index(dim) * jnp.uint32(stride % 2**32)
        stride *= shape[dim]
    column = index(axis)
    return (row, column) if start is None else (row + start[0], column + start[1])
