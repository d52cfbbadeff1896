"""Sums of products in float32, and the tensor scales that multiply them."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


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
