"""Where the runs of a matrix lie, and how the programs of a grid read and write them.

A run is what is rotated or scaled together along the contraction axis. A thread holds
whole runs, so that little moves between threads:

  Rows: a run is a piece of a row, which one thread reads in wide words and takes apart.
  Columns: a run goes down the rows; a thread reads its columns of each of them.
"""

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from fp4jax.kernels import registers
from fp4jax.kernels.planes import Plane
from fp4jax.numerics import random_bits

Where = tuple[jax.Array, ...]  # indices of a program in the grid


@dataclasses.dataclass(frozen=True)
class Geometry(abc.ABC):
    """The runs of a matrix.

    Attributes:
      shape: of the matrix, [r, c].
      size: elements of a run.
      square: side of square blocks, which runs then have, or None.
      width: runs of a thread.
      period: rows of each of the matrices that stand one above the other, where runs go
        down columns.
      interpret: whether what cannot be interpreted is put in other words.
    """

    shape: tuple[int, ...]
    size: int
    square: int | None
    width: int
    period: int
    interpret: bool

    @property
    def threads(self) -> int:
        """Runs of a program."""
        return registers.WARPGROUP * self.width

    @property
    def groups(self) -> int:
        """Runs of a program, or squares."""
        return self.threads // (self.square or 1)

    @property
    def plane(self) -> tuple[int, ...]:
        """Shape of a plane."""
        if self.square is None:
            return (self.threads,)
        return self.groups, self.square

    word: ClassVar[int]  # bits of an integer that holds codes of a run

    @property
    @abc.abstractmethod
    def lane(self) -> registers.Layout:
        """The layout of a plane."""

    @property
    @abc.abstractmethod
    def grid(self) -> dict[str, int]:
        """The programs."""

    @property
    @abc.abstractmethod
    def view(self) -> tuple[int, ...]:
        """The shape in which a kernel sees the matrix."""

    @abc.abstractmethod
    def load(self, ref: Any, where: Where) -> list[Plane]:
        """Returns the planes of a program's runs."""

    @abc.abstractmethod
    def elements(self, planes: int, dtype: Any) -> jax.ShapeDtypeStruct:
        """Returns the type of what is written of each run, so many planes."""

    @abc.abstractmethod
    def blocks(self, planes: int, dtype: Any) -> jax.ShapeDtypeStruct:
        """Returns the type of what is written of each block; a run has `planes`."""

    @abc.abstractmethod
    def store(self, ref: Any, where: Where, planes: Sequence[Plane]) -> None:
        """Writes planes of a program's runs, or of its squares."""

    @abc.abstractmethod
    def matrix(self, x: jax.Array) -> jax.Array:
        """Returns what was written as a matrix, integers as bytes."""

    @abc.abstractmethod
    def _coordinates(self, where: Where) -> tuple[Plane, Any]:
        """Returns row and half the column of each run's first element."""

    def run(
        self, kernel: Callable[..., None], x: jax.Array, *arrays: jax.Array, **how: Any
    ) -> Any:
        """Calls a kernel of a matrix and further arrays in every program of the grid.

        Args:
          kernel: of references to x as it is viewed, to the arrays and to the outputs.
          x: the matrix.
          *arrays: further inputs.
          **how: `out_type` and `interpret`, as `plgpu.kernel` takes them.
        """
        return plgpu.kernel(
            kernel,
            grid=tuple(self.grid.values()),
            grid_names=tuple(self.grid),
            compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
            **how,
        )(x.reshape(self.view), *arrays)

    def where(self) -> Where:
        """Returns the indices of this program, inside of a kernel."""
        return tuple(lax.axis_index(name) for name in self.grid)

    def across(self, amax: Plane) -> Plane:
        """Returns the amaxes of square blocks, given those of their runs."""
        if self.square is None:
            return amax
        spread = lax.broadcast_in_dim(jnp.max(amax, axis=1), amax.shape, (0,))
        return plgpu.layout_cast(spread, self.lane.pallas)

    def of_squares(self, planes: Sequence[Plane]) -> Sequence[Plane]:
        """Returns one element of each square, where all of a square are equal."""
        if self.square is None:
            return planes
        return [jnp.max(plane, axis=1) for plane in planes]

    def uniform(self, where: Where, noise: Any) -> Callable[[int], tuple[Plane, Plane]]:
        """Returns what maps i to the random bits of planes 2 i and 2 i + 1.

        Args:
          where: the program.
          noise: uint32 [4], two words of a key, row and column of the first element.
        """
        words = noise[0], noise[1]
        row, half_column = self._coordinates(where)
        row, half_column = row + noise[2], half_column + (noise[3] >> 1)
        return lambda i: random_bits.uniform16_pair(
            words, row, half_column + jnp.uint32(i)
        )

    def _index(self, first: jax.Array) -> Plane:
        """Returns first, first + 1, ... in a plane, uint32."""
        iota, *inside = (
            plgpu.layout_cast(
                lax.broadcasted_iota(jnp.uint32, self.plane, axis), self.lane.pallas
            )
            for axis in range(len(self.plane))
        )
        for other in inside:
            iota = iota * jnp.uint32(self.plane[1]) + other
        return iota + first.astype(jnp.uint32)


def along(axis: int, **fields: Any) -> Geometry:
    """Returns the geometry of runs along an axis: 0 or 1."""
    return (_Columns if axis == 0 else _Rows)(**fields)


class _Rows(Geometry):
    """Runs that are pieces of rows."""

    word = 32

    @property
    def lane(self) -> registers.Layout:
        return registers.lane_layout(1, self.square)

    @property
    def grid(self) -> dict[str, int]:
        rows, columns = self.view
        return {"rows": rows // self.threads, "columns": columns // self.size}

    @property
    def view(self) -> tuple[int, ...]:
        if self.square is not None:
            return self.shape
        return self.shape[0] * self.shape[1] // self.size, self.size

    def load(self, ref: Any, where: Where) -> list[Plane]:
        layout = registers.run_layout(self.size, ref.dtype)
        tile = ref.at[self._tile(where, self.threads, self.size)]
        x = registers.load(tile, layout)
        if self.interpret:
            return [x[:, j].reshape(self.plane) for j in range(self.size)]
        return registers.split(x, layout, self.plane, self.lane)

    def elements(self, planes: int, dtype: Any) -> jax.ShapeDtypeStruct:
        rows, columns = self.view
        return jax.ShapeDtypeStruct((rows, columns // self.size * planes), dtype)

    def blocks(self, planes: int, dtype: Any) -> jax.ShapeDtypeStruct:
        rows, columns = self.view
        shape = rows // (self.square or 1), columns // self.size * planes
        return jax.ShapeDtypeStruct(shape, dtype)

    def store(self, ref: Any, where: Where, planes: Sequence[Plane]) -> None:
        rows, planes = planes[0].size, [plane.astype(ref.dtype) for plane in planes]
        if len(planes) == 1:
            first = pl.ds(where[0] * rows, rows)
            registers.store(ref.at[first, where[1]], planes[0])
            return
        if self.interpret:
            x = jnp.stack([plane.reshape(-1) for plane in planes], axis=-1)
        else:
            layout = registers.run_layout(len(planes), ref.dtype)
            x = registers.join(planes, layout, self.lane)
        registers.store(ref.at[self._tile(where, rows, len(planes))], x)

    def matrix(self, x: jax.Array) -> jax.Array:
        if x.dtype == jnp.uint32:
            x = lax.bitcast_convert_type(x, jnp.uint8).reshape(x.shape[0], -1)
        return x if self.square is not None else x.reshape(self.shape[0], -1)

    def _coordinates(self, where: Where) -> tuple[Plane, Any]:
        index, half = self._index(where[0] * self.threads), jnp.uint32(self.size // 2)
        if self.square is not None:
            return index, where[1].astype(jnp.uint32) * half
        runs = jnp.uint32(self.shape[1] // self.size)
        return index // runs, index % runs * half

    def _tile(self, where: Where, rows: int, columns: int):
        return pl.ds(where[0] * rows, rows), pl.ds(where[1] * columns, columns)


class _Columns(Geometry):
    """Runs that go down the columns."""

    word = 8

    @property
    def lane(self) -> registers.Layout:
        return registers.lane_layout(self.width, self.square)

    @property
    def grid(self) -> dict[str, int]:
        rows, columns = self.shape
        return {"rows": rows // self.size, "columns": columns // self.threads}

    @property
    def view(self) -> tuple[int, ...]:
        return self.elements(self.size, jnp.float32).shape

    def load(self, ref: Any, where: Where) -> list[Plane]:
        tiles = (ref.at[self._tile(where, j, len(ref.shape))] for j in range(self.size))
        return [registers.load(tile, self.lane) for tile in tiles]

    def elements(self, planes: int, dtype: Any) -> jax.ShapeDtypeStruct:
        blocks, square = self.blocks(planes, dtype), self.square
        shape = blocks.shape if square is None else (*blocks.shape, square)
        return jax.ShapeDtypeStruct(shape, dtype)

    def blocks(self, planes: int, dtype: Any) -> jax.ShapeDtypeStruct:
        rows, columns = self.shape
        shape = rows // self.size, planes, columns // (self.square or 1)
        return jax.ShapeDtypeStruct(shape, dtype)

    def store(self, ref: Any, where: Where, planes: Sequence[Plane]) -> None:
        for j, plane in enumerate(planes):
            tile = ref.at[self._tile(where, j, len(ref.shape))]
            registers.store(tile, plane.astype(ref.dtype))

    def matrix(self, x: jax.Array) -> jax.Array:
        return x.reshape(x.shape[0] * x.shape[1], -1)

    def _coordinates(self, where: Where) -> tuple[Plane, Any]:
        runs = self.period // self.size
        batch = where[0] // runs * self.shape[1]
        column = where[0] % runs * (self.size // 2)
        row = self._index(where[1] * self.threads + batch)
        return row, column.astype(jnp.uint32)

    def _tile(self, where: Where, plane: int, rank: int):
        columns = pl.ds(where[1] * self.groups, self.groups)
        return (where[0], plane, columns, slice(None))[:rank]
