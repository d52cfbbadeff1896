"""Tiles of whole runs: what is rotated or scaled together lies in one thread.

Rows: a run is a piece of a row, which one thread reads in wide words and takes apart.
Columns: a run goes down the rows; a thread reads its columns of each of them.
"""
# ruff: noqa: D102 - methods say what they do where the geometry declares them

import abc
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from fp4jax.kernels import registers
from fp4jax.kernels.devices import WARPGROUP
from fp4jax.kernels.geometry import Geometry, Where
from fp4jax.kernels.planes import Plane


@dataclasses.dataclass(frozen=True)
class Runs(Geometry, abc.ABC):
    """The runs of a matrix.

    Attributes:
      size: elements of a run.
      width: runs of a thread.
    """

    size: int
    width: int

    @property
    def word(self) -> int:
        return 32

    @property
    def planes(self) -> int:
        return self.size

    @property
    def planes_of_block(self) -> int:
        return self.block

    @property
    def threads(self) -> int:
        """Runs of a program."""
        return WARPGROUP * self.width

    @property
    def plane(self) -> tuple[int, ...]:
        return (self.threads,)

    def store_blocks(self, ref: Any, where: Where, planes: Sequence[Plane]) -> None:
        self.store(ref, where, planes)


def along(axis: int, **fields: Any) -> Runs:
    """Returns the geometry of runs along an axis: 0 or 1."""
    return (Columns if axis == 0 else Rows)(axis=axis, **fields)


class Rows(Runs):
    """Runs that are pieces of rows."""

    @property
    def lane(self) -> registers.Layout:
        return registers.lane_layout(1)

    @property
    def grid(self) -> tuple[int, int]:
        return self.view[0] // self.threads, 1

    @property
    def view(self) -> tuple[int, ...]:
        return self.shape[0] * self.shape[1] // self.size, self.size

    def load(self, ref: Any, where: Where) -> list[Plane]:
        layout = registers.run_layout(self.size, ref.dtype)
        x = registers.load(ref.at[self._tile(where)], layout)
        if self.interpret:
            return [x[:, j].astype(jnp.float32) for j in range(self.size)]
        return registers.split(x, self.size, layout, self.plane, self.lane)

    def elements(self, bits: int, dtype: Any) -> jax.ShapeDtypeStruct:
        columns = self.size * bits // (8 * jnp.dtype(dtype).itemsize)
        return jax.ShapeDtypeStruct((self.view[0], columns), dtype)

    def blocks(self, dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((self.view[0], self.size // self.block), dtype)

    def store(self, ref: Any, where: Where, planes: Sequence[Plane]) -> None:
        size = ref.shape[1]
        if self.interpret:
            x = registers.held(planes, size, ref.dtype)
        else:
            layout, shape = registers.run_layout(size, ref.dtype), (self.threads, size)
            x = registers.join(planes, layout, self.lane, shape, ref.dtype)
        registers.store(ref.at[self._tile(where)], x)

    def matrix(self, x: jax.Array) -> jax.Array:
        return x.reshape(self.shape[0], -1)

    def row(self, where: Where) -> Plane:
        return self._index(where) // jnp.uint32(self.shape[1] // self.size)

    def _index(self, where: Where) -> Plane:
        """Returns the number of each run."""
        return self._iota(0) + (where[0] * self.threads).astype(jnp.uint32)

    def _pairs(self, where: Where) -> Callable[[int], tuple[Plane, Plane]]:
        index = self._index(where)
        runs = jnp.uint32(self.shape[1] // self.size)
        half_column = index % runs * jnp.uint32(self.size // 2)
        return lambda i: (index // runs, half_column + jnp.uint32(i))

    def _tile(self, where: Where):
        return pl.ds(where[0] * self.threads, self.threads), slice(None)


class Columns(Runs):
    """Runs that go down the columns."""

    @property
    def lane(self) -> registers.Layout:
        return registers.lane_layout(self.width)

    @property
    def grid(self) -> tuple[int, int]:
        rows, columns = self.shape
        return rows // self.size, columns // self.threads

    @property
    def view(self) -> tuple[int, ...]:
        rows, columns = self.shape
        return rows // self.size, self.size, columns

    def load(self, ref: Any, where: Where) -> list[Plane]:
        tiles = (ref.at[self._tile(where, j)] for j in range(self.size))
        return [self._float32(registers.load(tile, self.lane)) for tile in tiles]

    def elements(self, bits: int, dtype: Any) -> jax.ShapeDtypeStruct:
        rows, size, columns = self.view
        size = size * bits // (8 * jnp.dtype(dtype).itemsize)
        return jax.ShapeDtypeStruct((rows, size, columns), dtype)

    def blocks(self, dtype: Any) -> jax.ShapeDtypeStruct:
        rows, size, columns = self.view
        return jax.ShapeDtypeStruct((rows, size // self.block, columns), dtype)

    def store(self, ref: Any, where: Where, planes: Sequence[Plane]) -> None:
        if (count := ref.shape[1] // len(planes)) > 1:  # of words: a byte to each row
            planes = [plane >> (8 * i) for plane in planes for i in range(count)]
        for j, plane in enumerate(planes):
            registers.store(ref.at[self._tile(where, j)], plane.astype(ref.dtype))

    def matrix(self, x: jax.Array) -> jax.Array:
        return x.reshape(-1, x.shape[-1])

    def row(self, where: Where) -> jax.Array:
        return where[0] * self.size

    def _pairs(self, where: Where) -> Callable[[int], tuple[Plane, Plane]]:
        runs = self.period // self.size
        first = where[1] * self.threads + where[0] // runs * self.shape[1]
        row = self._iota(0) + first.astype(jnp.uint32)
        half_column = (where[0] % runs * (self.size // 2)).astype(jnp.uint32)
        return lambda i: (row, half_column + jnp.uint32(i))

    def _tile(self, where: Where, plane: int):
        return where[0], plane, pl.ds(where[1] * self.threads, self.threads)
