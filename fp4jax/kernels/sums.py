"""Sums of products in float32, and the tensor scales that multiply them."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def float32_sums(a: jax.Array, b: jax.Array, **kwargs: Any) -> jax.Array:
    """Computes `lax.dot_general` with float32 sums, on every device."""
    dot = functools.partial(
        lax.dot_general, preferred_element_type=jnp.float32, **kwargs
    )
    return float32_on_cpu(dot, a, b)


def float32_on_cpu(product: Callable[..., jax.Array], *arrays: jax.Array) -> jax.Array:
    """Calls a product with float32 sums; on a CPU, of the same operands in float32.

    Which is exact likewise, and faster. Besides, XLA's CPU has no product of smaller
    operands with float32 sums that it would write transposed.
    """
    if all(x.dtype.itemsize >= 4 for x in arrays):
        return product(*arrays)
    return lax.platform_dependent(
        *arrays,
        cpu=lambda *arrays: product(*(x.astype(jnp.float32) for x in arrays)),
        default=product,
    )


def in_turn(y: jax.Array, factors: Sequence[jax.Array]) -> jax.Array:
    """Returns y times tensor scales, one after the other: their product may overflow.

    The barrier keeps a compiler from moving a constant one to the end.
    """
    for factor in factors:
        y = y * lax.optimization_barrier(factor)
    return y
