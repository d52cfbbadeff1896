"""Four over six: each block takes the better of several scales.

A block whose amax is mapped to 4 instead of 6 spends the coarse top of E2M1's grid on
nothing, and all other elements see finer steps.

References: arXiv 2512.02010; Transformer Engine's `nvfp4_use_4over6`, whose order of
operations this follows.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from fp4jax.numerics import exact

_TINY = 2.0**-100


def best(
    x: jax.Array,
    choices: Sequence[tuple[jax.Array, jax.Array]],
    *,
    amax: jax.Array,
    denominator: float,
    inside: tuple[int, ...],
) -> tuple[jax.Array, jax.Array]:
    """Returns the values and scales of least mean absolute error, the first of equals.

    error = sum |values scale amax / denominator - x|

    Args:
      x: float32, axes split into blocks.
      choices: pairs of signed grid members and of block scales.
      amax: float32 [], of the tensor.
      denominator: g_max target, so that amax / denominator is the tensor scale.
      inside: the axes inside a block.
    """
    (values, scale), *others = choices
    least = _error(x, values * scale, amax, denominator, inside)
    for other_values, other_scale in others:
        error = _error(x, other_values * other_scale, amax, denominator, inside)
        better = error < least
        values = jnp.where(better, other_values, values)
        scale = jnp.where(better, other_scale, scale)
        least = jnp.where(better, error, least)
    return values, scale


def _error(x, operand, amax, denominator, inside) -> jax.Array:
    scaled = jnp.abs(operand) * amax
    is_tiny = scaled < _TINY
    scaled = exact.divide(jnp.where(is_tiny, 1, scaled), jnp.float32(denominator))
    scaled = jnp.where(is_tiny, 0, scaled)
    error = jnp.abs(jnp.where(operand < 0, -scaled, scaled) - x)
    # The last axis one by one, the other by halves: sums depend on their order, and
    # fprop and dgrad, which contract different axes of a weight, must decide alike.
    *rows, columns = inside
    total = jnp.zeros_like(jax.lax.slice_in_dim(error, 0, 1, axis=columns))
    for i in range(error.shape[columns]):
        total = total + jax.lax.slice_in_dim(error, i, i + 1, axis=columns)
    for axis in rows:
        total = _halved(total, axis)
    return total


def _halved(x: jax.Array, axis: int) -> jax.Array:
    """Sums an axis by adding its second half to its first until one is left."""
    while (size := x.shape[axis]) > 1:
        half = -(-size // 2)
        first = jax.lax.slice_in_dim(x, 0, half, axis=axis)
        second = jax.lax.slice_in_dim(x, half, size, axis=axis)
        pad = [(0, 0, 0)] * x.ndim
        pad[axis] = (0, 2 * half - size, 0)
        x = first + jax.lax.pad(second, jnp.float32(0), pad)
    return x
