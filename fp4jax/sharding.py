"""Meshes of devices, and how the arrays of a run lie on them.

An array names its axes by what they are, such as "batch" or "mlp"; `RULES` says over
which axes of the mesh each of them is spread, and nothing else does.
"""

import contextlib
import dataclasses
import math
from collections.abc import Mapping
from contextlib import AbstractContextManager
from types import MappingProxyType
from typing import Any, Generic, TypeVar

import jax
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

T = TypeVar("T")

# The axes of a mesh. Neighbors along the last are neighbors in the network.
DATA, FSDP, EXPERT, TENSOR = AXES = ("data", "fsdp", "expert", "tensor")

# Over which axes of the mesh an axis of an array is spread. An axis of the mesh serves
# the first of an array's that asks for it: parameters are spread over "embed" where
# they are stored; activations are not, as their rows have taken its axes.
RULES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "batch": (DATA, FSDP, EXPERT),  # rows of a batch
        "replica": (DATA,),  # rows, as far as parameters are not spread
        "expert": (EXPERT, TENSOR),  # along both, an expert is whole
        "embed": (FSDP, EXPERT),  # features of the residual stream
        "mlp": (TENSOR,),
        "heads": (TENSOR,),
        "vocab": (TENSOR,),
    }
)


_VIRTUAL = (
    " A CPU is as many devices as the environment says: "
    "XLA_FLAGS=--xla_force_host_platform_device_count=8."
)


def parse_mesh(text: str) -> dict[str, int]:
    """Returns the sizes that a text such as "data=2,fsdp=4" gives to axes of a mesh.

    Raises:
      ValueError: another axis, one that is named twice, or a size that is no positive
        number.

    Example:
      >>> parse_mesh("fsdp=2,tensor=4")
      {'fsdp': 2, 'tensor': 4}
    """
    sizes: dict[str, int] = {}
    for part in text.split(","):
        axis, _, size = part.partition("=")
        if axis not in AXES or axis in sizes or not size.isdecimal() or int(size) < 1:
            raise ValueError(
                f"parse_mesh: mesh must read AXIS=N,..., each axis of "
                f"{', '.join(AXES)} at most once and every N positive, got {text!r}."
            )
        sizes[axis] = int(size)
    return sizes


def make_mesh(**sizes: int) -> Mesh:
    """Returns a mesh of the first devices; axes that are not named have size 1.

    Args:
      **sizes: of the axes in `AXES`.

    Raises:
      ValueError: there are not so many devices, or several processes and other than all
        of their devices.
      TypeError: another axis.

    Example:
      >>> dict(make_mesh(fsdp=1).shape)
      {'data': 1, 'fsdp': 1, 'expert': 1, 'tensor': 1}
    """
    if unknown := sizes.keys() - set(AXES):
        raise TypeError(
            f"make_mesh: axes must be of {', '.join(AXES)}, got {', '.join(unknown)}."
        )
    shape = [sizes.get(axis, 1) for axis in AXES]
    size, count = math.prod(shape), jax.device_count()
    if not 1 <= size <= count or (jax.process_count() > 1 and size != count):
        many = f"at most the number of devices, {count}"
        if jax.process_count() > 1:
            many = f"the number of devices of all processes, {count}"
        raise ValueError(
            f"make_mesh: the product of the sizes must be positive and {many}, "
            f"got {size} ({', '.join(f'{k}={v}' for k, v in sizes.items())}). Change "
            f"{' or '.join(sizes or AXES)}."
            f"{_VIRTUAL if size > count and jax.default_backend() == 'cpu' else ''}"
        )
    types = (AxisType.Auto,) * len(AXES)
    return jax.make_mesh(shape, AXES, types, devices=jax.devices()[:size])


def spec(*axes: str | None) -> P:
    """Returns how an array with such axes lies on a mesh.

    Example:
      >>> tuple(spec("batch", None, "mlp"))
      (('data', 'fsdp', 'expert'), None, 'tensor')
    """
    taken: set[str] = set()
    found: list[tuple[str, ...] | None] = []
    for axis in axes:
        free = [each for each in RULES.get(axis or "", ()) if each not in taken]
        taken.update(free)
        found.append(tuple(free) or None)
    return P(*found)


def used(*axes: str | None) -> P:
    """Returns how a parameter lies while rows of a batch meet it.

    Example:
      >>> tuple(spec("embed", "mlp")), tuple(used("embed", "mlp"))
      ((('fsdp', 'expert'), 'tensor'), (None, 'tensor'))
    """
    return P(*spec("batch", *axes)[1:])


def context_mesh() -> AbstractMesh | None:
    """Returns the mesh that a program is compiled for, if it is one of `make_mesh`.

    None as well inside of `jax.shard_map`, where arrays are parts.
    """
    mesh = jax.sharding.get_abstract_mesh()
    is_ours = mesh.axis_names == AXES and set(mesh.axis_types) == {AxisType.Auto}
    return mesh if is_ours else None


def spreads_rows(count: int) -> bool:
    """Returns whether the context's mesh divides so many rows of a batch."""
    mesh = context_mesh()
    return mesh is not None and mesh.size > 1 and count % num_shards("batch") == 0


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """Makes an array lie on the context's mesh as its axes say, and its cotangent too.

    Without a mesh nothing happens.
    """
    if context_mesh() is None:
        return x
    return lax.with_sharding_constraint(x, spec(*axes))


@dataclasses.dataclass(frozen=True)
class Compiled(Generic[T]):
    """A function that `jax.jit` compiles for a mesh, or for one device.

    Attributes:
      function: what `jax.jit` returned.
      mesh: that `constrain` sees inside; None: none.
    """

    function: jax.stages.Wrapped
    mesh: Mesh | None

    def __call__(self, *args: Any) -> T:
        """Runs it."""
        with self._context:
            return self.function(*args)

    def lower(self, *args: Any) -> jax.stages.Lowered:
        """Returns its program for arguments that need not be arrays."""
        with self._context:
            return self.function.lower(*args)

    @property
    def _context(self) -> AbstractContextManager[Any]:
        return (
            contextlib.nullcontext() if self.mesh is None else jax.set_mesh(self.mesh)
        )


def num_shards(axis: str, mesh: Mesh | AbstractMesh | None = None) -> int:
    """Returns over how many parts of a mesh an axis of an array is spread.

    Args:
      axis: a name in `RULES`.
      mesh: by default the context's; 1 part without one.
    """
    mesh = context_mesh() if mesh is None else mesh
    return 1 if mesh is None else math.prod(mesh.shape[each] for each in RULES[axis])


def process_rows(mesh: Mesh) -> tuple[int, int]:
    """Returns which of how many equal parts of a batch's rows this process places.

    Processes whose devices differ along `tensor` only place the same rows.

    Raises:
      ValueError: the rows of the processes would overlap in part.
    """
    groups = mesh.devices.reshape(num_shards("batch", mesh), -1)
    process = jax.process_index()
    mine = [
        i
        for i, group in enumerate(groups)
        if any(d.process_index == process for d in group)
    ]
    first, count = mine[0], len(mine)
    if (
        mine != list(range(first, first + count))
        or first % count
        or len(groups) % count
    ):
        raise ValueError(
            "process_rows: tensor must divide the devices of a process or be a "
            f"multiple of them, got {dict(mesh.shape)}, of which process {process} has "
            f"the rows {mine}. Change tensor, or the devices of each process."
        )
    return first // count, len(groups) // count


def shard_rows(batch: Mapping[str, Any], mesh: Mesh) -> dict[str, jax.Array]:
    """Spreads the rows of a batch over the mesh.

    Args:
      batch: the part of its rows that `process_rows` names.
      mesh: from `make_mesh`.

    Raises:
      ValueError: the rows do not divide.
    """
    sharding, shards = NamedSharding(mesh, spec("batch")), num_shards("batch", mesh)
    rows = len(next(iter(batch.values()))) * process_rows(mesh)[1]
    if rows % shards:
        raise ValueError(
            "shard_rows: batch must have a multiple of as many rows as data, fsdp and "
            f"expert have devices, {shards}, got rows={rows}. Change the rows, or a "
            "size of the mesh."
        )
    return {
        name: jax.make_array_from_process_local_data(sharding, np.asarray(x))
        for name, x in batch.items()
    }
