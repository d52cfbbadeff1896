"""Products of a packed operand by the reference: decoded to memory, then multiplied."""

import functools
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from fp4jax.kernels.quantize import Written

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


def float32_sums(a: jax.Array, b: jax.Array, **kwargs: Any) -> jax.Array:
    """Computes `lax.dot_general` with float32 sums.

    A CPU multiplies the same operands in float32: exact likewise, and faster.
    """
    dot = functools.partial(
        lax.dot_general, preferred_element_type=jnp.float32, **kwargs
    )
    if a.dtype == jnp.float32:
        return dot(a, b)
    return lax.platform_dependent(
        a,
        b,
        cpu=lambda a, b: dot(a.astype(jnp.float32), b.astype(jnp.float32)),
        default=dot,
    )


def in_turn(y: jax.Array, factors: Sequence[jax.Array]) -> jax.Array:
    """Returns y times tensor scales, one after the other: their product may overflow.

    The barrier keeps a compiler from moving a constant one to the end.
    """
    for factor in factors:
        y = y * lax.optimization_barrier(factor)
    return y
