"""The encoding of square blocks for FP8 tensor cores, as plain as it can be said."""

import jax
import jax.numpy as jnp

from fp4jax.numerics import Quantizer, blocks, random_bits, rounding, scaling


def amax(x: jax.Array, side: int) -> jax.Array:
    """Returns the amax of each square block of a matrix, NaN where it has one.

    Args:
      x: float32 or bfloat16 [r, c].
      side: of a block in elements.

    Returns:
      Float32 [r / side, c / side].
    """
    rows, columns = (n // side for n in x.shape)
    squares = x.reshape(rows, side, columns, side)
    return blocks.amax(squares, (1, 3)).reshape(rows, columns)


def encode(
    x: jax.Array,
    quantizer: Quantizer,
    powers: jax.Array,
    *,
    axis: int,
    noise: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns a quantized matrix and its transpose in E4M3.

    values scale powers[0],  (values scale powers[1])^T

    Args:
      x: float32 or bfloat16 [r, c].
      quantizer: of square blocks and scales that are powers of two.
      powers: float32 [2, r / b, c / b], powers of two of each block of b x b elements.
      axis: the contraction axis, for quantizers that draw.
      noise: uint32 [4], two words of a key, row and column of the first element.
    """
    side, bits = quantizer.block_size, None

    def of_elements(of_blocks: jax.Array) -> jax.Array:
        return jnp.repeat(jnp.repeat(of_blocks, side, 0), side, 1)

    scale, inverse = scaling.block_scale(amax(x, side), quantizer.scale, quantizer.grid)
    if noise is not None:
        index = [jax.lax.broadcasted_iota(jnp.uint32, x.shape, i) for i in (0, 1)]
        row, column = index[1 - axis] + noise[2], index[axis] + noise[3]
        bits = random_bits.uniform16((noise[0], noise[1]), row, column)
    t = x.astype(jnp.float32) * of_elements(inverse)
    values = rounding.to_grid(t, quantizer.grid, bits)
    rows, columns = (
        (values * of_elements(scale * power)).astype(jnp.float8_e4m3fn)
        for power in powers
    )
    return rows, columns.T
