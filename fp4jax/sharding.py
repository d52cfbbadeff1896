"""Meshes of devices, and how the arrays of a run lie on them."""

from collections.abc import Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

T = TypeVar("T")

DATA = "data"  # the axis along which the rows of a batch are spread


def data_mesh(size: int) -> Mesh:
    """Returns a mesh of the first `size` devices, all along the axis `data`.

    Raises:
      ValueError: there are not so many devices, or several processes and other than all
        of their devices.
    """
    count = jax.device_count()
    if not 1 <= size <= count or (jax.process_count() > 1 and size != count):
        wanted = f"from 1 to {count}" if jax.process_count() == 1 else f"{count}"
        raise ValueError(
            f"data_mesh: size must be {wanted}, the number of devices, got size={size}."
        )
    devices = np.asarray(jax.devices()[:size])
    return Mesh(devices, (DATA,), axis_types=(AxisType.Auto,))


def replicated(mesh: Mesh) -> NamedSharding:
    """Returns the sharding of an array that every device has whole."""
    return NamedSharding(mesh, P())


def replicate(tree: T, mesh: Mesh) -> T:
    """Puts a tree of arrays, the same in every process, whole on every device."""

    def put(x: jax.Array) -> jax.Array:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            words = put(jax.random.key_data(x))
            return jax.random.wrap_key_data(words, impl=jax.random.key_impl(x))
        # `jax.device_put` puts keys on the devices of one process only.
        return jax.make_array_from_process_local_data(replicated(mesh), np.asarray(x))

    return jax.tree.map(put, tree)


def shard_rows(batch: Mapping[str, Any], mesh: Mesh) -> dict[str, jax.Array]:
    """Spreads the rows of a batch over the axis `data`.

    Args:
      batch: of each process its own rows, in the order of the processes.
      mesh: from `data_mesh`.

    Raises:
      ValueError: the rows do not divide by the devices.
    """
    sharding = NamedSharding(mesh, P(DATA))
    rows = len(next(iter(batch.values())))
    if rows * jax.process_count() % mesh.size:
        raise ValueError(
            "shard_rows: batch must have a multiple of as many rows as there are "
            f"devices, {mesh.size}, got {rows * jax.process_count()} rows."
        )
    return {
        name: jax.make_array_from_process_local_data(sharding, np.asarray(x))
        for name, x in batch.items()
    }
