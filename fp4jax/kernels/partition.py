"""On which devices an array lies, in names of mesh axes."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.custom_partitioning import (
    ArrayMapping,
    CompoundFactor,
    SdyShardingRule,
    custom_partitioning,
)
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fp4jax.numerics.spread import Spread as Spread


def is_whole(mesh: Any) -> bool:
    """Returns whether a device has all of an array of a mesh, or its part to itself."""
    if mesh.empty:
        return jax.device_count() == 1
    return mesh.size == 1 or set(mesh.axis_types) == {AxisType.Manual}


def partitioned(
    function: Callable[..., Any],
    partition: Callable[..., Any],
    rule: Callable[..., SdyShardingRule],
) -> Any:
    """Returns a function as an operation that the partitioner divides.

    Args:
      function: of arrays, on one device.
      partition: as of `custom_partitioning.def_partition`.
      rule: likewise, `sharding_rule`.
    """
    operation = custom_partitioning(jax.jit(function))  # in which constants may stand
    operation.def_partition(
        partition=partition,
        sharding_rule=rule,
        decode_shardings=False,  # which fails where an axis of the mesh is split
    )
    return operation


def everywhere(function: Callable[..., jax.Array]) -> Any:
    """Returns a function as an operation that every device of a program computes."""

    def partition(mesh: Mesh, arguments: Any, _: Any):
        if mesh.empty:
            x = jax.tree.leaves(arguments)[0]
            mesh = mesh_of(x.sharding, x.shape, ())
        whole = NamedSharding(mesh, P())
        return mesh, function, whole, jax.tree.map(lambda _: whole, arguments)

    def rule(_: Mesh, arguments: Any, results: Any) -> SdyShardingRule:
        def mappings(of: str, arrays: Any) -> tuple[ArrayMapping, ...]:
            axes = enumerate(range(len(x.shape)) for x in arrays)
            return tuple(ArrayMapping(*(f"{of}{i}_{j}" for j in js)) for i, js in axes)

        operands, found = mappings("a", arguments), mappings("b", results)
        inside = [factor for mapping in (*operands, *found) for factor in mapping]
        return rule_of(operands, found, sizes={}, inside=inside)

    return partitioned(function, partition, rule)


def rule_of(
    operands: tuple[ArrayMapping, ...],
    results: tuple[ArrayMapping, ...],
    *,
    sizes: Mapping[str, int],
    inside: Sequence[str],
) -> SdyShardingRule:
    """Returns which axes of arguments and results go together.

    Args:
      operands: factors of the axes of each.
      results: likewise.
      sizes: of factors; a rule has those that are no axis of their own anywhere.
      inside: factors along which nothing is spread.
    """
    used = {factor for of in (*operands, *results) for factor in of}
    parts = {f for each in used if isinstance(each, CompoundFactor) for f in each}
    known: Any = {f: n for f, n in sizes.items() if f in parts - used}
    return SdyShardingRule(
        operands, results, need_replication_factors=tuple(inside), **known
    )


def in_runs(
    x: Any, mesh: Mesh, axes: tuple[tuple[str, int], ...], runs: Mapping[int, int]
) -> tuple[Mesh, Spread]:
    """Returns the mesh of an array and over which axes of it this is spread.

    Args:
      x: its shape and sharding.
      mesh: as the partitioner knows it; where that is empty, one of `axes`.
      axes: names and sizes, as of `mesh_of`.
      runs: by axis, elements that stay together: where they would be cut, an axis is
        not spread.
    """
    mesh = mesh_of(x.sharding, x.shape, axes) if mesh.empty else mesh
    spread = spread_of(x.sharding, x.shape, mesh)

    def names_of(axis: int) -> tuple[str, ...]:
        shards = math.prod(mesh.shape[name] for name in spread[axis])
        is_cut = x.shape[axis] % (shards * runs.get(axis, 1))
        return () if is_cut else spread[axis]

    return mesh, tuple(map(names_of, range(len(x.shape))))


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
