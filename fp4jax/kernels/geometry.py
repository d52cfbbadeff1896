"""Where the blocks of a matrix lie, and how programs of a grid read and write them.

A program is a warpgroup. What its threads hold is a tile in planes: plane j is element
j of what each of them holds. `fp4jax.kernels.runs` gives a thread whole runs along the
contraction axis, `fp4jax.kernels.squares` a part of a square block.
"""

import abc
import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax

from fp4jax.kernels import elementwise, registers
from fp4jax.kernels.instructions import Nvidia
from fp4jax.kernels.planes import Plane
from fp4jax.numerics import random_bits
from fp4jax.numerics.instructions import PORTABLE, Portable
from fp4jax.numerics.manual import varying_as

Where = tuple[Any, Any]  # row and column of a program in the grid


def launch(
    kernel: Callable[..., None], *arrays: jax.Array, programs: int, **how: Any
) -> Any:
    """Calls a kernel in so many programs, in each of which `program` is its number.

    Args:
      kernel: of references to the arrays and to the outputs.
      *arrays: inputs.
      programs: how many.
      **how: `out_type` and `interpret`, as `plgpu.kernel` takes them.
    """
    found = plgpu.kernel(
        kernel,
        grid=(programs,),
        grid_names=("program",),
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True,
            # Of a warpgroup's semantics Python lowers ten times as long.
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
        **how,
    )(*arrays)
    return varying_as(found, *arrays)  # which a kernel does not say of itself


@dataclasses.dataclass(frozen=True)
class Geometry(abc.ABC):
    """The tiles of a matrix.

    Attributes:
      shape: of the matrix, [r, c].
      axis: the contraction axis: 0 or 1.
      block: elements of a block along the contraction axis.
      period: rows of each of the matrices that stand one above the other, where the
        contraction axis is 0.
      interpret: whether what cannot be interpreted is put in other words.
    """

    shape: tuple[int, int]
    axis: int
    block: int
    period: int
    interpret: bool

    @property
    @abc.abstractmethod
    def word(self) -> int:
        """Bits of an integer that holds codes of a thread."""

    @property
    @abc.abstractmethod
    def planes(self) -> int:
        """Planes of a tile: elements of a thread."""

    @property
    @abc.abstractmethod
    def planes_of_block(self) -> int:
        """Planes that share a scale."""

    @property
    @abc.abstractmethod
    def plane(self) -> tuple[int, ...]:
        """Shape of a plane."""

    @property
    @abc.abstractmethod
    def lane(self) -> registers.Layout:
        """The layout of a plane."""

    @property
    @abc.abstractmethod
    def grid(self) -> tuple[int, int]:
        """Rows and columns of programs."""

    @property
    @abc.abstractmethod
    def view(self) -> tuple[int, ...]:
        """The shape in which a kernel sees the matrix."""

    @abc.abstractmethod
    def load(self, ref: Any, where: Where) -> list[Plane]:
        """Returns the planes of a program's tile in float32."""

    @abc.abstractmethod
    def elements(self, bits: int, dtype: Any) -> jax.ShapeDtypeStruct:
        """Returns the type of what is written, so many bits of each element."""

    @abc.abstractmethod
    def blocks(self, dtype: Any) -> jax.ShapeDtypeStruct:
        """Returns the type of what is written of each block."""

    @abc.abstractmethod
    def store(self, ref: Any, where: Where, planes: Sequence[Plane]) -> None:
        """Writes planes, of elements or of words that hold several."""

    @abc.abstractmethod
    def store_blocks(self, ref: Any, where: Where, planes: Sequence[Plane]) -> None:
        """Writes what all of a block have in common."""

    @abc.abstractmethod
    def matrix(self, x: jax.Array) -> jax.Array:
        """Returns what was written of elements as a matrix."""

    def block_matrix(self, x: jax.Array) -> jax.Array:
        """Returns what was written of blocks as a matrix."""
        return self.matrix(x)

    def across(self, amax: Plane) -> Plane:
        """Returns the amaxes of blocks, given those of what threads hold of them."""
        return amax

    @property
    def instructions(self) -> Portable:
        """What rounds planes and finds codes."""
        if self.interpret:
            return PORTABLE
        functions = (
            elementwise.add_down,
            elementwise.reciprocal,
            elementwise.high_halves,
        )
        return Nvidia(*(functools.partial(f, lane=self.lane) for f in functions))

    @abc.abstractmethod
    def row(self, where: Where) -> Any:
        """Returns a row, of the matrix, of the blocks of each thread of a program."""

    @abc.abstractmethod
    def _pairs(self, where: Where) -> Callable[[int], tuple[Plane, Plane]]:
        """Returns what maps i to the position of planes 2 i and 2 i + 1.

        A position is an index along the free axes, and half of one along the
        contraction axis.
        """

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
        x = x.reshape(self.view)
        return launch(kernel, x, *arrays, programs=self.programs, **how)

    @property
    def programs(self) -> int:
        """How many there are in the grid."""
        return math.prod(self.grid)

    def where(self, program: Any = None) -> Where:
        """Returns the place in the grid of a program, by default of this one."""
        program = lax.axis_index("program") if program is None else program
        columns = self.grid[1]
        return (program, 0) if columns == 1 else divmod(program, columns)

    def uniform(
        self, where: Where, noise: Any, tokens: Any = None
    ) -> Callable[[int], tuple[Plane, Plane]]:
        """Returns what maps i to the random bits of planes 2 i and 2 i + 1.

        Args:
          where: the program.
          noise: uint32 [4], two words of a key, row and column of the first element.
          tokens: uint32 [r], the row or column that stands for each row of the matrix,
            which then is one; None: as they stand in it.
        """
        words, pairs = (noise[0], noise[1]), self._pairs(where)
        first_row, first_half = noise[2], noise[3] >> 1

        def bits(i: int) -> tuple[Plane, Plane]:
            row, half_column = pairs(i)
            if tokens is None:
                row = row + first_row
            elif self.axis == 1:
                row = self._at(tokens, row)
            else:  # neighbors are from anywhere: none shares a hash
                columns = (self._at(tokens, 2 * half_column + odd) for odd in (0, 1))
                row = row + first_row
                even, odd = (random_bits.uniform16(words, row, c) for c in columns)
                return even, odd
            return random_bits.uniform16_pair(words, row, half_column + first_half)

        return bits

    def factor(self, where: Where, ref: Any) -> tuple[Any, Any]:
        """Returns s_enc and 1 / s_enc of the blocks of a program.

        Args:
          where: the program.
          ref: float32 [2 n] of n s_enc, then the others: one for each row, or one.
        """
        count = ref.shape[0] // 2
        row = jnp.int32(0) if count == 1 else self.row(where)
        return self._at(ref, row), self._at(ref, row + count)

    def _at(self, ref: Any, index: jax.Array) -> jax.Array:
        """Returns the elements of a vector at a plane of indices, or at one."""
        index = index.astype(jnp.int32)
        if index.ndim == 0:
            return ref[index]
        return elementwise.look_up(ref, index, self.lane, self.interpret)

    def _float32(self, plane: Plane) -> Plane:
        if self.interpret or plane.dtype != jnp.bfloat16:
            return plane.astype(jnp.float32)
        return elementwise.widen(plane, self.lane)

    def _iota(self, axis: int) -> Plane:
        """Returns the index along an axis of a plane, uint32."""
        iota = lax.broadcasted_iota(jnp.uint32, self.plane, axis)
        return plgpu.layout_cast(iota, self.lane.pallas)
