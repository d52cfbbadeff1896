"""Products by what is kept packed, of which nothing is decoded to memory."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fp4jax.kernels.choice import chosen
from fp4jax.kernels.quantize import Output, Written
from fp4jax.kernels.scaled_matmul import Side, scaled_matmul
from fp4jax.ops.operands import Operand


def product(
    a: Operand, b: Operand, *, factors: Sequence[jax.Array], dtype: Any
) -> jax.Array | None:
    """Returns the product of two operands without batch axes, one of them packed.

    Args:
      a: an operand.
      b: likewise.
      factors: float32 [], what multiplies the sums, one after the other.
      dtype: of the result.

    Returns:
      [*free axes of a, *free axes of b]; None where neither is packed, or where
      `KERNELS` has nobody who multiplies by packed operands.
    """
    if chosen().scaled_matmul is None or a.shape[a.axis] != b.shape[b.axis]:
        return None
    side: Side
    for side, operand, other in (("lhs", a, b), ("rhs", b, a)):
        blocks = operand.blocks
        if (
            isinstance(blocks, Written)
            and Output.OPERAND not in blocks.quantized.arrays
        ):
            y = scaled_matmul(
                blocks,
                _matrix(other),
                axis=min(other.axis, 1),
                side=side,
                factors=factors,
                dtype=dtype,
            )
            return y.reshape(*a.free, *b.free)
    return None


def _matrix(operand: Operand) -> jax.Array:
    """Returns what a product reads of an operand whose first or last axis it contracts.

    Its other axes are one.
    """
    x = operand.values(jnp.bfloat16)
    k = x.shape[operand.axis]
    return x.reshape((k, -1) if operand.axis == 0 else (-1, k))
