"""MS-EDEN: scales that make nearest rounding unbiased under a random rotation."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from fp4jax.numerics import blocks, exact
from fp4jax.numerics.quantizer import Quantizer
from fp4jax.numerics.rounding import MSEden, round_stochastic

# Elements enter the sum of a block as integers of this unit: it is exact in any order,
# and at most 256 squares of at most 7 fit 32 bits.
_UNITS = 2**9
# A block's sum keeps 16 bits, so that its product with a squared scale of 4 significant
# bits is exact, contracted with the addition that follows or not.
_SUM_MANTISSA = 15


def correction(
    scale: jax.Array,
    t: jax.Array,
    values: jax.Array,
    *,
    axis: int,
    blocks_in_group: int,
) -> jax.Array:
    """Returns S = <x, x> / <x, x_q> of each group, for every block of it.

    x = t scale,  x_q = values scale

    Args:
      scale: float32 block scales of 3 mantissa bits.
      t: float32 scaled elements, the contraction axis split in [blocks, block].
      values: what they were rounded to.
      axis: the axis of the blocks.
      blocks_in_group: blocks that share S.

    Returns:
      Float32, size 1 inside a block; 1 where the denominator is 0.
    """
    units = jnp.minimum(jnp.abs(t), jnp.float32(7)) * jnp.float32(_UNITS)
    units = jnp.round(units).astype(jnp.uint32)
    halves = (jnp.abs(values) * 2).astype(jnp.uint32)
    weight = scale * scale

    def group_sum(x: jax.Array) -> jax.Array:
        x = jnp.sum(x, axis=axis + 1, keepdims=True, dtype=jnp.uint32)
        x = lax.reduce_precision(x.astype(jnp.float32), 8, _SUM_MANTISSA) * weight
        x = blocks.split_axis(x, axis, blocks_in_group)
        block = functools.partial(lax.slice_in_dim, x, axis=axis + 1)
        total = block(0, 1)
        for i in range(1, blocks_in_group):  # in this order on every backend
            total = total + block(i, i + 1)
        return blocks.join_axes(jnp.broadcast_to(total, x.shape), axis)

    squares, products = group_sum(units * units), group_sum(units * halves)
    is_zero = products == 0
    ratio = exact.divide(
        jnp.where(is_zero, 1, squares), jnp.where(is_zero, 1, products)
    )
    return jnp.where(is_zero, jnp.float32(1), ratio * jnp.float32(2 / _UNITS))


def corrected_scales(
    scale: jax.Array,
    t: jax.Array,
    values: jax.Array,
    quantizer: Quantizer,
    *,
    axis: int,
    bits: jax.Array,
) -> jax.Array:
    """Rounds scale S to one of the two scales around it, unbiased; NaN stays.

    Args:
      scale: float32 block scales.
      t: as of `correction`.
      values: as of `correction`.
      quantizer: that rounds by `MSEden`.
      axis: as of `correction`.
      bits: uint32 uniform in [0, 2^16), one for each block.
    """
    assert isinstance(quantizer.rounding, MSEden)
    blocks_in_group = quantizer.rounding.group // quantizer.block_size
    factor = correction(scale, t, values, axis=axis, blocks_in_group=blocks_in_group)
    return jnp.where(
        jnp.isnan(scale),
        scale,
        round_stochastic(scale * factor, bits, quantizer.scale.format),
    )
