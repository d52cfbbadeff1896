"""Square blocks of a matrix that lies on several devices: each does its part.

An axis may be spread in whole squares. Where it is not, all of it comes to each device.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

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


class Along(NamedTuple):
    """What an axis of an array runs along.

    Attributes:
      axis: of the matrix.
      of_squares: whether its squares are counted, not its rows or columns.
    """

    axis: int
    of_squares: bool = False


# Of each axis of an array; None: along nothing of the matrix.
Layout = tuple[Along | None, ...]
MATRIX: Layout = (Along(0), Along(1))
TRANSPOSED: Layout = MATRIX[::-1]
SQUARES: Layout = (Along(0, of_squares=True), Along(1, of_squares=True))
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
    tile = [math.lcm(side, n) for n in TILE_OF_SQUARES]
    known = {
        i: tile[along.axis] // (side if along.of_squares else 1)
        for i, along in enumerate(layout)
        if along is not None
    }
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

        def of(layout: Layout) -> NamedSharding:
            names = [spread[along.axis] if along else () for along in layout]
            return NamedSharding(mesh, P(*(of_axis or None for of_axis in names)))

        local = lambda *arrays: tuple(part(spread, *arrays))
        return mesh, local, tuple(map(of, results)), tuple(map(of, arguments))

    whole = lambda *arrays: tuple(part(_WHOLE, *arrays))
    rule = lambda mesh, args, _: _rule(side, args[0], arguments, results)
    return partitioned(whole, partition, rule)


def _rule(
    side: int, x: Any, arguments: Sequence[Layout], results: Sequence[Layout]
) -> SdyShardingRule:
    """Returns which axes go together: a factor for squares, one for what is inside."""
    counts, insides = [n // side for n in x.shape], ["in0", "in1"]

    def factor(along: Along | None, place: str) -> str | CompoundFactor:
        if along is None:
            return f"other{place}"
        squares, inside = f"d{along.axis}", insides[along.axis]
        if along.of_squares:
            return squares
        return CompoundFactor(squares, inside) if counts[along.axis] > 1 else inside

    def mappings(layouts: Sequence[Layout], of: str) -> tuple[ArrayMapping, ...]:
        return tuple(
            ArrayMapping(*(factor(a, f"{of}{i}_{j}") for j, a in enumerate(layout)))
            for i, layout in enumerate(layouts)
        )

    return rule_of(
        mappings(arguments, "a"),
        mappings(results, "b"),
        sizes={f"d{i}": n for i, n in enumerate(counts)} | dict.fromkeys(insides, side),
        inside=insides,
    )
