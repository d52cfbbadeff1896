"""Products of a packed operand by the reference: decoded to memory, then multiplied."""

from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp

from fp4jax.kernels.quantize import Written
from fp4jax.kernels.sums import float32_sums, in_turn

Side = Literal["lhs", "rhs"]


def scaled_matmul(
    packed: Written,
    other: jax.Array,
    *,
    axis: int,
    side: Side,
    factors: Sequence[jax.Array],
    dtype: Any,
) -> jax.Array:
    """Computes what `fp4jax.kernels.scaled_matmul` does, of the same arguments."""
    operands = [(packed.operand(jnp.bfloat16), packed.axis), (other, axis)]
    (a, of_a), (b, of_b) = operands if side == "lhs" else operands[::-1]
    y = float32_sums(a, b, dimension_numbers=(((of_a,), (of_b,)), ((), ())))
    return in_turn(y, factors).astype(dtype)
