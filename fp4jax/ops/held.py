"""Held tensor amaxes: sampled every few steps, and in between not read from the tensor.

The state of a linear layer is float32[3], the amaxes of x, w and dy; 0 means not yet
seen. It enters `dot_general` as an argument, and what it becomes leaves as the
cotangent of that argument.
"""

import jax
import jax.numpy as jnp
from jax import lax

from fp4jax.numerics import blocks


def sample(
    x: jax.Array, held: jax.Array, *, every: int, step: jax.Array | None
) -> jax.Array:
    """Returns the amax of `x` where it is due, otherwise the one held.

    due = (held = 0) or (step mod every = 0)

    Off the step, the branch that reads `x` is not taken. Under `jax.vmap`, lanes that
    share a held amax share its sample, the maximum over them all; lanes with a held
    amax each have one each.

    Args:
      x: the operand, of any shape.
      held: float32 [].
      every: the period.
      step: int32 [], or None to sample at first use only.
    """
    due = held == 0
    if step is not None:
        due |= step % every == 0
    return _sample(x, held, due)


@jax.custom_batching.custom_vmap
def _sample(x: jax.Array, held: jax.Array, due: jax.Array) -> jax.Array:
    """Samples lanes, the leading axes of `x` that `held` and `due` have too."""
    inside = tuple(range(held.ndim, x.ndim))

    def read() -> jax.Array:
        return jnp.where(due, blocks.amax(x, inside).reshape(held.shape), held)

    # One predicate for all lanes: a batched one would run both branches.
    return lax.cond(jnp.any(due), read, lambda: held)


@_sample.def_vmap
def _sample_lanes(axis_size: int, in_batched: list[bool], x, held, due):
    if in_batched == [True, False, False]:
        return _sample(jnp.moveaxis(x, 0, held.ndim), held, due), False
    lanes = (
        a if batched else jnp.broadcast_to(a, (axis_size, *a.shape))
        for a, batched in zip((x, held, due), in_batched, strict=True)
    )
    return _sample(*lanes), True
