"""How a quantization is divided over the devices of a mesh: each does its part.

No array in equal parts is gathered: a contraction axis may be spread in whole runs, any
other axis, as that of `jax.vmap`, in any way. On Explicit axes the type of the array
says how it is spread; on Auto axes the partitioner does, by a rule.
"""

import dataclasses
import functools
from typing import Any

import jax
from jax import lax
from jax.experimental.custom_partitioning import (
    ArrayMapping,
    CompoundFactor,
    SdyShardingRule,
)
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from fp4jax.kernels.partition import in_runs, is_whole, partitioned, rule_of
from fp4jax.kernels.quantize.both import Both
from fp4jax.kernels.quantize.part import Call
from fp4jax.kernels.quantize.way import Inputs, Way
from fp4jax.numerics.spread import spread_of, why_cut


def why_not(x: jax.Array, way: Way) -> str | None:
    """Returns why the work on an array cannot be divided, or None."""
    mesh = jax.typeof(x).sharding.mesh
    if AxisType.Auto in (kinds := set(mesh.axis_types)) and len(kinds) > 1:
        return f"no rule divides over the automatic axes of {mesh} alone"
    return why_cut(x, way.runs)


def are_spread(inputs: Any, batched: Any) -> bool:
    """Returns whether lanes of inputs are, by their types, on several devices."""
    leaves = zip(jax.tree.leaves(inputs), jax.tree.leaves(batched), strict=True)
    return any(is_batched and _first(a) is not None for a, is_batched in leaves)


def as_lanes(size: int, batched: Any, args: Any) -> Any:
    """Returns arrays with a first axis, of lanes, which all spread alike.

    Args:
      size: of that axis.
      batched: whether an array has it.
      args: the arrays.
    """
    leaves, structure = jax.tree.flatten(args)
    flags, lanes = jax.tree.leaves(batched), None
    for a, is_batched in zip(leaves, flags, strict=True):
        if is_batched and _first(a) is not None:
            lanes = jax.typeof(a).sharding

    def as_lane(a: jax.Array, is_batched: bool) -> jax.Array:
        if lanes is None:
            return a if is_batched else lax.broadcast(a, (size,))
        spec = jax.typeof(a).sharding.spec[1 if is_batched else 0 :]
        spread = NamedSharding(lanes.mesh, P(lanes.spec[0], *spec))
        if is_batched:
            return jax.sharding.reshard(a, spread)
        return lax.broadcast(a, (size,), out_sharding=spread)

    return jax.tree.unflatten(structure, map(as_lane, leaves, flags))


def _first(x: jax.Array) -> Any:
    """Returns over what the type of an array spreads its first axis."""
    spec = jax.typeof(x).sharding.spec
    return spec[0] if spec else None


def quantize(call: Call | Both, x: jax.Array, inputs: Any) -> tuple[Any, ...]:
    """Quantizes an array as `call.quantize` does, on the devices where it lies."""
    mesh = jax.typeof(x).sharding.mesh
    if AxisType.Explicit in mesh.axis_types:
        return _explicit(call, x, inputs)
    if is_whole(mesh) or not call.backend.is_divisible:
        return call.quantize(x, inputs)
    leaves, structure = jax.tree.flatten(inputs)
    return _auto(call, structure, mesh.shape_tuple)(x, *leaves)


def _explicit(call: Call | Both, x: jax.Array, inputs: Any) -> tuple[Any, ...]:
    """Quantizes an array whose type says how it is spread."""
    sharding = jax.typeof(x).sharding
    mesh, spread = sharding.mesh, spread_of(x)
    of_inputs = _beside(call, inputs, sharding.spec)
    found = (P(*sharding.spec[:axes]) for axes in call.returns(inputs))
    inputs = jax.tree.map(
        lambda a, spec: jax.sharding.reshard(a, NamedSharding(mesh, spec)),
        inputs,
        of_inputs,
    )
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    explicit = {name for name, kind in kinds if kind == AxisType.Explicit}
    return jax.shard_map(
        lambda x, inputs: call.quantize(x, inputs, spread),
        in_specs=(sharding.spec, of_inputs),
        out_specs=tuple(found),
        # None named are all that `jax.vmap` does not hide.
        axis_names=set() if explicit == set(mesh.axis_names) else explicit,
        check_vma=False,
    )(x, inputs)


@functools.cache
def _auto(call: Call | Both, structure: Any, axes: tuple[tuple[str, int], ...]) -> Any:
    """Returns the operation on x and the leaves of inputs, with its rule.

    Args:
      call: the quantization.
      structure: of inputs.
      axes: names and sizes of the mesh that is known so far.
    """

    def partition(mesh: Mesh, args: Any, results: Any):
        inputs = jax.tree.unflatten(structure, args[1:])
        x = args[0]
        mesh, spread = in_runs(x, mesh, axes, call.runs)
        of_x = NamedSharding(mesh, P(*(names or None for names in spread)))
        of_inputs = _beside(call, inputs, of_x.spec)

        def local(x: jax.Array, *leaves: jax.Array) -> tuple[Any, ...]:
            of_part = jax.tree.unflatten(structure, leaves)
            return call.quantize(x, of_part, spread)

        axes_of = call.returns(inputs)
        found = tuple(NamedSharding(mesh, P(*of_x.spec[:n])) for n in axes_of)
        assert len(found) == len(results)
        specs = jax.tree.leaves(of_inputs, is_leaf=lambda x: isinstance(x, P))
        read = (of_x, *(NamedSharding(mesh, spec) for spec in specs))
        return mesh, local, found, read

    def whole(x: jax.Array, *leaves: jax.Array) -> tuple[Any, ...]:
        return call.quantize(x, jax.tree.unflatten(structure, leaves))

    def rule(mesh: Mesh, args: Any, results: Any) -> SdyShardingRule:
        return _rule(call, jax.tree.unflatten(structure, args[1:]), args, results)

    return partitioned(whole, partition, rule)


def _beside(call: Call | Both, inputs: Any, spec: P) -> Any:
    """Returns how what is read beside an array is spread.

    Tokens and amaxes lie where the rows and entries are that they are of.
    """
    of_lanes = P(*spec[: call.lanes])

    def of_each(inputs: Inputs) -> Any:
        specs = jax.tree.map(lambda _: of_lanes, inputs)
        amax, tokens = jax.tree.map(
            lambda of: P(*spec[: len(of.shape)]), (inputs.amax, inputs.tokens)
        )
        return dataclasses.replace(specs, amax=amax, tokens=tokens)

    return jax.tree.map(of_each, inputs, is_leaf=_is_inputs)


def _is_inputs(x: Any) -> bool:
    return isinstance(x, Inputs)


def _rule(call: Call | Both, inputs: Any, args: Any, results: Any) -> SdyShardingRule:
    """Returns which axes of arguments and results go together.

    A blocked axis is a factor for its runs or squares, and one for what is inside.

    Args:
      call: the quantization.
      inputs: of the types of what is read beside the array.
      args: MLIR types of the array and of what else is read.
      results: of the outputs and what else is returned.
    """
    shape = args[0].shape
    runs = {i: shape[i] // size for i, size in call.runs.items()}
    inside: dict[str, int] = {}  # in the order of their first use, as the rule wants

    def factors(of: Any, i: int) -> str | CompoundFactor:
        n = of.shape[i]
        size = n // runs[i] if i in runs else 1
        if size == 1:
            return f"d{i}"
        inside[within := f"in{i}of{size}"] = size
        return within if n == size else CompoundFactor(f"d{i}", within)

    def mapping(of: Any) -> ArrayMapping:
        return ArrayMapping(*(factors(of, i) for i in range(len(of.shape))))

    def replicated(of: Any, name: str) -> ArrayMapping:
        inside = (f"{name}{i}" for i in range(call.lanes, len(of.shape)))
        return ArrayMapping(*(f"d{i}" for i in range(call.lanes)), *inside)

    each = jax.tree.leaves(inputs, is_leaf=_is_inputs)
    beside = [of for one in each for of in (one.amax, one.tokens)]
    operands = (
        mapping(args[0]),
        *(
            mapping(of)
            if any(of is each for each in beside)
            else replicated(of, f"s{j}n")
            for j, of in enumerate(args[1:])
        ),
    )
    found = tuple(map(mapping, results))
    sizes = {f"d{i}": n for i, n in runs.items()} | inside
    return rule_of(operands, found, sizes=sizes, inside=list(inside))
