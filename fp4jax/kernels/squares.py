"""Tiles of square blocks: a warp holds 32 x 32 elements, a thread a patch of 4 x 8.

Of its patch a thread reads rows in wide words. It can write them so, and it can write
the columns in words of four bytes: a matrix and its transpose from one read.
"""
# ruff: noqa: D102 - methods say what they do where the geometry declares them

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from fp4jax.kernels import elementwise, registers
from fp4jax.kernels.devices import TILE_OF_SQUARES as TILE
from fp4jax.kernels.devices import WARPGROUP
from fp4jax.kernels.geometry import Geometry, Where
from fp4jax.kernels.planes import Plane
from fp4jax.kernels.registers import PATCH
from fp4jax.numerics import exact

SIDES = (8, 16, 32)


@dataclasses.dataclass(frozen=True)
class Squares(Geometry):
    """The square blocks of a matrix.

    Planes are the elements of a patch along the contraction axis, one row of it after
    the other where that is 1, one column after the other where it is 0.
    """

    @property
    def word(self) -> int:
        return 32 if self.axis == 1 else 8

    @property
    def planes(self) -> int:
        return PATCH[0] * PATCH[1]

    @property
    def planes_of_block(self) -> int:
        return self.planes

    @property
    def plane(self) -> tuple[int, ...]:
        patches = self.block**2 // self.planes
        return WARPGROUP // patches, patches

    @property
    def lane(self) -> registers.Layout:
        return registers.lane_layout(1, self.plane[1])

    @property
    def grid(self) -> tuple[int, int]:
        rows, columns = self.shape
        return rows // TILE[0], columns // TILE[1]

    @property
    def view(self) -> tuple[int, ...]:
        return self._view(PATCH[0], self.shape[1])

    def load(self, ref: Any, where: Where) -> list[Plane]:
        layout = registers.patch_layout(self.block, PATCH[1], ref.dtype)
        rows = []
        for i in range(PATCH[0]):
            x = registers.load(ref.at[self._row(where, i, TILE[1])], layout)
            if self.interpret:
                rows.append(self._apart(x))
            else:
                lane = self.lane
                rows.append(registers.split(x, PATCH[1], layout, self.plane, lane))
        across = rows if self.axis == 1 else zip(*rows, strict=True)
        return [plane for line in across for plane in line]

    def elements(self, bits: int, dtype: Any) -> jax.ShapeDtypeStruct:
        size, out_bits = [PATCH[0], self.shape[1]], 8 * jnp.dtype(dtype).itemsize
        size[self.axis] = size[self.axis] * bits // out_bits
        return jax.ShapeDtypeStruct(self._view(*size), dtype)

    def transposed(self, dtype: Any) -> jax.ShapeDtypeStruct:
        """Returns the type of a transpose of elements of one byte."""
        rows, columns = self.shape
        return jax.ShapeDtypeStruct((columns // PATCH[1], PATCH[1], rows), dtype)

    def blocks(self, dtype: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((*self.grid, self.plane[0]), dtype)

    def store(self, ref: Any, where: Where, planes: Sequence[Plane]) -> None:
        rows = ref.shape[2]
        if self.axis == 0:
            self.store_rows(ref, where, [planes[i::rows] for i in range(rows)])
        else:
            size = len(planes) // rows
            starts = range(0, len(planes), size)
            self.store_rows(ref, where, [planes[i : i + size] for i in starts])

    def store_rows(
        self, ref: Any, where: Where, rows: Sequence[Sequence[Plane]]
    ) -> None:
        """Writes the rows of patches, of elements or of words that hold several."""
        columns = TILE[1] * ref.shape[3] // self.shape[1]
        layout = registers.patch_layout(self.block, columns // _LANES[1], ref.dtype)
        for i, row in enumerate(rows):
            x = self._join(row, layout, (_LANES[0], columns), ref.dtype, _ACROSS)
            registers.store(ref.at[self._row(where, i, columns)], x)

    def store_columns(self, ref: Any, where: Where, words: Sequence[Plane]) -> None:
        """Writes the columns of patches, each a word of four bytes, as rows."""
        layout = registers.column_layout(self.block)
        patches = pl.ds(where[1] * _LANES[1], _LANES[1])
        rows = pl.ds(where[0] * TILE[0], TILE[0])
        for j, word in enumerate(words):
            x = self._join([word], layout, (_LANES[1], TILE[0]), ref.dtype, _DOWN)
            registers.store(ref.at[patches, j, rows], x)

    def patch(self, planes: Sequence[Plane]) -> list[Sequence[Plane]]:
        """Returns the rows of a patch, given planes of its elements."""
        rows, columns = PATCH
        if self.axis == 0:
            return [planes[i::rows] for i in range(rows)]
        return [planes[i * columns : (i + 1) * columns] for i in range(rows)]

    def words(self, planes: Sequence[Plane]) -> list[Plane]:
        """Returns words of four E4M3 each, of planes that it holds exactly."""
        fours = (planes[i : i + 4] for i in range(0, len(planes), 4))
        return [
            elementwise.e4m3_word(four, self.lane, self.interpret) for four in fours
        ]

    def store_blocks(self, ref: Any, where: Where, planes: Sequence[Plane]) -> None:
        (plane,) = planes
        registers.store(ref.at[where], _largest(plane).astype(ref.dtype))

    def load_blocks(self, ref: Any) -> Plane:
        """Returns in a plane what a program has of each block."""
        of_blocks = registers.load(ref, self.lane.pallas.reduce(1))
        return self._spread(of_blocks)

    def matrix(self, x: jax.Array) -> jax.Array:
        return x.reshape(-1, x.shape[-1])

    def block_matrix(self, x: jax.Array) -> jax.Array:
        per_side = TILE[0] // self.block
        x = x.reshape(*self.grid, -1, per_side, per_side)
        return x.transpose(0, 3, 1, 2, 4).reshape(self._blocks)

    def of_programs(self, x: jax.Array) -> jax.Array:
        """Returns what is known of blocks, [..., r, c], as programs load it."""
        per_side, (rows, columns) = TILE[0] // self.block, self.grid
        x = x.reshape(-1, rows, per_side, columns, TILE[1] // TILE[0], per_side)
        return x.transpose(0, 1, 3, 4, 2, 5).reshape(-1, *self.grid, self.plane[0])

    def across(self, amax: Plane) -> Plane:
        return self._spread(_largest(amax))

    def row(self, where: Where) -> jax.Array:
        return where[0] * TILE[0]

    def _spread(self, of_blocks: Plane) -> Plane:
        spread = lax.broadcast_in_dim(of_blocks, self.plane, (0,))
        return plgpu.layout_cast(spread, self.lane.pallas)

    def _pairs(self, where: Where) -> Callable[[int], tuple[Plane, Plane]]:
        square, inside = self._iota(0), self._iota(1)
        per_side, across = TILE[0] // self.block, self.block // PATCH[1]
        row = square // per_side % per_side * self.block + inside // across * PATCH[0]
        warp, column = square // per_side**2 * TILE[0], square % per_side * self.block
        column = warp + column + inside % across * PATCH[1]
        first = where[0] * TILE[0], where[1] * TILE[1]
        if self.axis == 0:
            batch, start = divmod(first[0], self.period)
            free = column + _unsigned(first[1] + batch * self.shape[1])
            contracted, size = row + _unsigned(start), PATCH[0] // 2
        else:
            free = row + _unsigned(first[0])
            contracted, size = column + _unsigned(first[1]), PATCH[1] // 2
        half = contracted >> 1
        return lambda i: (free + jnp.uint32(i // size), half + jnp.uint32(i % size))

    @property
    def _blocks(self) -> tuple[int, int]:
        return self.shape[0] // self.block, self.shape[1] // self.block

    def _view(self, rows: int, columns: int) -> tuple[int, ...]:
        return self.shape[0] // TILE[0], _LANES[0], rows, columns

    def _row(self, where: Where, i: int, columns: int):
        return where[0], slice(None), i, pl.ds(where[1] * columns, columns)

    @property
    def _patches(self) -> tuple[int, ...]:
        """Of the patches of a program: warps, squares and patches, down and across."""
        per_side = TILE[0] // self.block
        of_square = self.block // PATCH[0], self.block // PATCH[1]
        return TILE[1] // TILE[0], per_side, per_side, *of_square

    def _apart(self, x: jax.Array) -> list[Plane]:
        """Returns the planes of rows of patches."""
        warps, down, across, rows, columns = self._patches
        x = x.reshape(down, rows, warps, across, columns, PATCH[1])
        x = x.transpose(2, 0, 3, 1, 4, 5).reshape(*self.plane, PATCH[1])
        return [x[..., j].astype(jnp.float32) for j in range(PATCH[1])]

    def _join(self, planes, layout, shape, dtype, order: tuple[int, ...]) -> jax.Array:
        if not self.interpret:
            return registers.join(planes, layout, self.lane, shape, dtype)
        held = registers.held(planes, math.prod(shape) // WARPGROUP, dtype)
        return held.reshape(*self._patches, -1).transpose(order).reshape(shape)


# The order of what `_patches` counts, and what each holds, in rows of an array.
_ACROSS, _DOWN = (1, 3, 0, 2, 4, 5), (0, 2, 4, 1, 3, 5)
_LANES = TILE[0] // PATCH[0], TILE[1] // PATCH[1]  # patches of a program


def _largest(plane: Plane) -> jax.Array:
    """Returns the largest of what is not negative in each square, NaN where one is."""
    if plane.dtype != jnp.float32:
        return jnp.max(plane, axis=1)
    return exact.float_of(jnp.max(exact.bits_of(plane), axis=1))


def _unsigned(x: Any) -> jax.Array:
    return jnp.asarray(x).astype(jnp.uint32)
