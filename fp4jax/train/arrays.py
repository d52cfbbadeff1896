"""The arrays of a run by name, and checksums that do not depend on their sharding."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fp4jax.train.state import TrainState

Arrays = dict[str, jax.Array]


def take_apart(state: TrainState) -> Arrays:
    """Returns the arrays of a state by name, keys as the words that they hold."""
    named, _ = jax.tree_util.tree_flatten_with_path(state)
    return {
        jax.tree_util.keystr(path, simple=True, separator="."): (
            jax.random.key_data(x) if _is_key(x) else x
        )
        for path, x in named
    }


def put_together(arrays: Arrays, like: TrainState) -> TrainState:
    """Returns the state that `take_apart` has taken apart."""
    leaves, structure = jax.tree.flatten(like)

    def leaf(name: str, old: jax.Array) -> jax.Array:
        x = arrays[name]
        if not _is_key(old):
            return x
        return jax.random.wrap_key_data(x, impl=jax.random.key_impl(old))

    named = zip(take_apart(like), leaves, strict=True)
    return jax.tree.unflatten(structure, [leaf(name, old) for name, old in named])


def _is_key(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


@jax.jit
def inspect(arrays: Arrays) -> tuple[Arrays, Arrays]:
    """Returns the checksum of every array, and whether all of it is finite."""
    sums = {name: _checksum(x) for name, x in arrays.items()}
    return sums, {name: jnp.isfinite(x).all() for name, x in arrays.items()}


def _checksum(x: jax.Array) -> jax.Array:
    """Returns sum_i bits(x_i) (2 h(i) + 1) modulo 2^32, h a bijection of uint32.

    Any single damaged element changes it, and swapped ones do with all likelihood. A
    sum of integers does not depend on its order, so neither on the sharding.
    """
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint8)
    unsigned = jnp.dtype(f"uint{8 * x.dtype.itemsize}")
    bits = lax.bitcast_convert_type(x, unsigned).astype(jnp.uint32)
    index, stride = jnp.zeros(x.shape, jnp.uint32), 1
    for axis in reversed(range(x.ndim)):
        along = lax.broadcasted_iota(jnp.uint32, x.shape, axis)
        index = index + along * jnp.uint32(stride % 2**32)
        stride *= x.shape[axis]
    index = (index ^ (index >> 16)) * jnp.uint32(0x85EBCA6B)
    return jnp.sum(bits * (2 * index + 1), dtype=jnp.uint32)
