"""Inside of `jax.shard_map`: along which mesh axes an array differs, by its type."""

from collections.abc import Collection
from typing import Any

import jax
from jax import lax

from fp4jax.numerics import exact


def varying_as(arrays: Any, *others: Any) -> Any:
    """Returns arrays that differ along every mesh axis along which any here does.

    Autodiff then adds up, over these axes, the gradient of one that was alike on all.

    Args:
      arrays: a tree of them.
      *others: trees of those that they are computed from, or with.
    """
    leaves = jax.tree.leaves((arrays, *others))
    axes = frozenset().union(*(jax.typeof(a).mat.varying for a in leaves))

    def as_all(a: jax.Array) -> jax.Array:
        missing = tuple(sorted(axes - jax.typeof(a).mat.varying))
        return lax.pcast(a, missing, to="varying") if missing else a

    return jax.tree.map(as_all, arrays)


def pmax(magnitudes: jax.Array, axes: Collection[str]) -> jax.Array:
    """Returns the largest of float32 magnitudes along mesh axes, which may be none.

    Compared as integers: NaN is above all others.
    """
    if not axes:
        return magnitudes
    return exact.float_of(lax.pmax(exact.bits_of(magnitudes), tuple(sorted(axes))))


def amax_as(amax: jax.Array, held: jax.Array) -> jax.Array:
    """Returns the largest along mesh axes along which amaxes differ and `held` not."""
    return pmax(amax, jax.typeof(amax).mat.varying - jax.typeof(held).mat.varying)
