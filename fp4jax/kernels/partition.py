"""On which devices an array lies, in names of mesh axes."""

import math
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

# The mesh axes over which each axis of an array is spread.
Spread = tuple[tuple[str, ...], ...]


def is_whole(mesh: Any) -> bool:
    """Returns whether a device has all of an array of a mesh, or its part to itself."""
    if mesh.empty:
        return jax.device_count() == 1
    return mesh.size == 1 or set(mesh.axis_types) == {AxisType.Manual}


def mesh_of(
    sharding: jax.sharding.Sharding,
    shape: tuple[int, ...],
    axes: tuple[tuple[str, int], ...],
) -> Mesh:
    """Returns the mesh of a sharding's devices, in their order.

    Args:
      sharding: of an array.
      shape: of that array.
      axes: names and sizes; where they are of other devices, there is one axis.
    """
    devices = np.array(list(sharding.devices_indices_map(shape)))
    names, sizes = [name for name, _ in axes], [size for _, size in axes]
    if math.prod(sizes) != devices.size:
        names, sizes = ["device"], [devices.size]
    return Mesh(devices.reshape(sizes), names)


def spread_of(
    sharding: jax.sharding.Sharding, shape: tuple[int, ...], mesh: Mesh
) -> Spread:
    """Returns over which mesh axes an array is spread, () where by parts of an axis.

    Args:
      sharding: of the array.
      shape: of the array.
      mesh: of the same devices.
    """
    try:
        shard, indices = (
            sharding.shard_shape(shape),
            sharding.devices_indices_map(shape),
        )
    except ValueError:  # parts of unequal sizes
        return ((),) * len(shape)
    found: list[tuple[str, ...]] = []
    for axis, size in enumerate(shard):
        part = [(indices[d][axis].start or 0) // size for d in mesh.devices.flat]
        found.append(_names(np.array(part).reshape(mesh.devices.shape), mesh))
    return tuple(found)


def _names(part: np.ndarray, mesh: Mesh) -> tuple[str, ...]:
    """Returns the mesh axes, slowest first, along which parts are numbered."""
    strides = {}
    for axis, (name, size) in enumerate(mesh.shape.items()):
        first = np.take(part, 0, axis)
        stride = int(np.take(part, 1, axis).flat[0] - first.flat[0]) if size > 1 else 0
        if stride > 0:
            strides[name] = stride
    names = tuple(sorted(strides, key=lambda name: -strides[name]))
    number = np.zeros(part.shape, int)
    for name in names:
        index = np.arange(mesh.shape[name])
        others = [i for i, other in enumerate(mesh.shape) if other != name]
        number = number * mesh.shape[name] + np.expand_dims(index, others)
    return names if np.array_equal(number, part) else ()
