"""Square blocks of a matrix that lies on several devices: each does its part.

An axis may be spread in whole squares. Where it is not, all of it comes to each device.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.custom_partitioning import (
    ArrayMapping,
    CompoundFactor,
    SdyShardingRule,
)
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fp4jax.kernels.devices import TILE_OF_SQUARES
from fp4jax.kernels.partition import Spread, in_runs, is_whole, partitioned, rule_of
from fp4jax.numerics import blocks

# What an array has along its axes: the rows R and columns C of the matrix, those of its
# squares r and c, or something else.
Layout = str
Part = Callable[..., Sequence[jax.Array]]  # of a spread, and of arrays
_WHOLE: Spread = ((), ())


def is_divisible(mesh: Any) -> bool:
    """Returns whether there is a rule for what lies on a mesh, or no need of one."""
    alike = [{AxisType.Auto}, {AxisType.Manual}]
    return mesh.empty or mesh.size == 1 or set(mesh.axis_types) in alike


def divided(
    part: Part, side: int, arguments: Sequence[Layout], results: Sequence[Layout]
) -> Callable[..., Sequence[jax.Array]]:
    """Returns the operation that does its part on every device.

    Args:
      part: what a device does; the same object for the same operation.
      side: of a square.
      arguments: what the arrays have along their axes, the matrix first.
      results: likewise.
    """

    def operation(*arrays: jax.Array) -> Sequence[jax.Array]:
        mesh = jax.sharding.get_abstract_mesh()
        if is_whole(mesh):
            return part(_WHOLE, *arrays)
        layouts = tuple(arguments), tuple(results)
        return _auto(part, side, *layouts, mesh.shape_tuple)(*arrays)

    return operation


def padded(x: jax.Array, side: int, layout: Layout) -> jax.Array:
    """Returns a part of an array as kernels take it, of whole tiles of squares."""
    tile = math.lcm(side, TILE_OF_SQUARES[0]), math.lcm(side, TILE_OF_SQUARES[1])
    sizes = {"R": tile[0], "C": tile[1], "r": tile[0] // side, "c": tile[1] // side}
    known = {i: sizes[name] for i, name in enumerate(layout) if name in sizes}
    return blocks.pad_to_multiple(x, known)


def moved(
    noise: jax.Array, shape: tuple[int, ...], axis: int, spread: Spread
) -> jax.Array:
    """Returns where random bits of a part begin, for those of the whole.

    Args:
      noise: uint32 [4], two words of a key, row and column of the first element.
      shape: of the part.
      axis: the contraction axis, along which columns run.
      spread: of the whole.
    """
    for i, names in enumerate(spread):
        if names:
            index = lax.axis_index(names).astype(jnp.uint32)
            noise = noise.at[3 if i == axis else 2].add(index * jnp.uint32(shape[i]))
    return noise


@functools.cache
def _auto(
    part: Part,
    side: int,
    arguments: tuple[Layout, ...],
    results: tuple[Layout, ...],
    axes: tuple[tuple[str, int], ...],
) -> Any:
    """Returns the operation with its rule, on a mesh of axes of names and sizes."""

    def partition(mesh: Mesh, args: Any, _: Any):
        mesh, spread = in_runs(args[0], mesh, axes, {0: side, 1: side})
        of_axes = {"r": spread[0] or None, "c": spread[1] or None}
        of_arguments, of_results = (
            tuple(
                NamedSharding(mesh, P(*(of_axes.get(name.lower()) for name in layout)))
                for layout in layouts
            )
            for layouts in (arguments, results)
        )
        local = lambda *arrays: tuple(part(spread, *arrays))
        return mesh, local, of_results, of_arguments

    whole = lambda *arrays: tuple(part(_WHOLE, *arrays))
    rule = lambda mesh, args, _: _rule(side, args[0], arguments, results)
    return partitioned(whole, partition, rule)


def _rule(
    side: int, x: Any, arguments: Sequence[Layout], results: Sequence[Layout]
) -> SdyShardingRule:
    """Returns which axes go together: a factor for squares, one for what is inside."""
    inside = {"r": "r_in", "c": "c_in"}
    count = {"r": x.shape[0] // side, "c": x.shape[1] // side}

    def factor(name: str, place: str) -> str | CompoundFactor:
        if name not in "RC":
            return name if name in "rc" else f"other{place}"
        name = name.lower()
        within = inside[name]
        return CompoundFactor(name, within) if count[name] > 1 else within

    def mappings(layouts: Sequence[Layout], of: str) -> tuple[ArrayMapping, ...]:
        return tuple(
            ArrayMapping(*(factor(n, f"{of}{i}_{j}") for j, n in enumerate(layout)))
            for i, layout in enumerate(layouts)
        )

    return rule_of(
        mappings(arguments, "a"),
        mappings(results, "b"),
        sizes=count | dict.fromkeys(inside.values(), side),
        inside=[*inside.values()],
    )
