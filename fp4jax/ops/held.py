"""Held tensor amaxes: sampled every few steps, and in between not read from the tensor.

The state of a linear layer is float32[3], the amaxes of x, w and dy; 0 means not yet
seen. It enters `dot_general` as an argument, and what it becomes leaves as the
cotangent of that argument.
"""

from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from fp4jax.numerics import blocks
from fp4jax.numerics.groups import Groups
from fp4jax.numerics.manual import amax_as

AMAX = "fp4_amax"  # the name that `jax.checkpoint` policies may save

T = TypeVar("T")

# Whether what is traced reads operands that may be due: True, all of them; False, those
# alone that always are; None: each under a condition of its own.
_READS: Any = jax.make_user_context(None)


def is_due(held: jax.Array, *, every: int, step: jax.Array | None) -> jax.Array:
    """Returns which amaxes a step samples: due = (held = 0) or (step mod every = 0)."""
    due = held == 0
    return due if step is None else due | (step % every == 0)


def under_one_condition(due: jax.Array, function: Callable[[], T]) -> T:
    """Returns what a function does, with samples where any is due, else without.

    In place of a condition for each operand, which takes a GPU tens of microseconds.

    Args:
      due: bool [...], whether amaxes are, of those that not every step samples.
      function: what is traced twice.
    """

    def traced(reads: bool) -> T:
        with _READS(reads):
            return function()

    return lax.cond(_any(due), lambda: traced(True), lambda: traced(False))


def sample(
    x: jax.Array,
    held: jax.Array,
    *,
    every: int,
    step: jax.Array | None,
    groups: Groups | None = None,
) -> jax.Array:
    """Returns the amax of `x` where it is due, otherwise the one held.

    Where it is not due, the branch that reads `x` is not taken; inside of
    `under_one_condition` that decides. A group that is known to have no entries, which
    have no amax, is never due. Under `jax.vmap`, lanes that share a held amax share its
    sample, the maximum over them all; lanes with a held amax each have one each. So it
    is with the devices of a `jax.shard_map`.

    Args:
      x: the operand, of any shape; where its parts have amaxes each, [e, ...], or in
        the order of groups.
      held: float32 [], or [e].
      every: the period.
      step: int32 [], or None to sample at first use only.
      groups: which of the e each entry of x belongs to.
    """
    reads = True if every == 1 and step is not None else _READS.value
    if reads is False:
        return held
    due = is_due(held, every=every, step=step)
    if groups is None:
        amax = lambda: _amax(x, held)
    else:
        if groups.used is not None:
            due &= amax_as(groups.used.astype(jnp.float32), held) > 0
        held = _no_vmap(held, x)
        amax = lambda: groups.amax(x)
    read = lambda: jnp.where(due, amax_as(amax(), held), held)
    return read() if reads else lax.cond(_any(due), read, lambda: held)


@jax.custom_batching.custom_vmap
def _any(due: jax.Array) -> jax.Array:
    """Returns one predicate for all lanes: by one each, both branches would run."""
    return jnp.any(due)


@_any.def_vmap
def _any_of_lanes(axis_size: int, in_batched: list[bool], due: jax.Array):
    return _any(due), False


@jax.custom_batching.custom_vmap
def _amax(x: jax.Array, held: jax.Array) -> jax.Array:
    """Returns the amax of each lane, of the leading axes of `x` that `held` has too."""
    return blocks.amax(x, tuple(range(held.ndim, x.ndim))).reshape(held.shape)


@_amax.def_vmap
def _amax_of_lanes(axis_size: int, in_batched: list[bool], x, held):
    if in_batched == [True, False]:
        return _amax(jnp.moveaxis(x, 0, held.ndim), held), False
    lanes = (
        a if batched else jnp.broadcast_to(a, (axis_size, *a.shape))
        for a, batched in zip((x, held), in_batched, strict=True)
    )
    return _amax(*lanes), True


@jax.custom_batching.custom_vmap
def _no_vmap(held: jax.Array, x: jax.Array) -> jax.Array:
    del x
    return held


@_no_vmap.def_vmap
def _no_vmap_rule(*_):
    raise NotImplementedError(
        "ragged_dot: held must be None under jax.vmap, whose lanes would add their "
        "amaxes, got both. Call it once for all groups of all lanes."
    )
