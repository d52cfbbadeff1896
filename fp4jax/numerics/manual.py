"""Inside of `jax.shard_map`: along which mesh axes an array differs, by its type."""

from typing import Any

import jax
from jax import lax


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
