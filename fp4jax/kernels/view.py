"""An array of any rank as the matrix that a kernel reads."""

import dataclasses
import math

import jax

from fp4jax.kernels import block_sizes
from fp4jax.kernels.devices import WARPGROUP


@dataclasses.dataclass(frozen=True)
class View:
    """An array as a matrix with its contraction axis first or last.

    Attributes:
      matrix: [r, c].
      axis: the contraction axis of it, or of the matrices that stand one above the
        other in it.
      period: rows of each of these.
      shape: of the array.
      contraction: the contraction axis of the array.
    """

    matrix: jax.Array
    axis: int
    period: int
    shape: tuple[int, ...]
    contraction: int

    @classmethod
    def of(cls, x: jax.Array, axis: int) -> "View":
        """Returns that of an array and its contraction axis."""
        n = x.shape[axis]
        if axis == x.ndim - 1:
            return cls(x.reshape(-1, n), 1, n, x.shape, axis)
        columns = math.prod(x.shape[axis + 1 :])
        return cls(x.reshape(-1, columns), 0, n, x.shape, axis)

    def shape_of(self, matrix: jax.Array) -> tuple[int, ...]:
        """Returns the shape of an array that only the contraction axis may shorten."""
        n = self.shape[self.contraction] * matrix.size // self.matrix.size
        return *self.shape[: self.contraction], n, *self.shape[self.contraction + 1 :]

    def width(self, run: int, kernel: str | None = None) -> int:
        """Returns the runs of each thread, 0 if the shape has not room for one.

        They are those of `block_sizes`, or half as many, and so on.

        Args:
          run: elements of a run.
          kernel: of `block_sizes`; None: "rows" or "columns", by the axis.
        """
        runs = self.matrix.shape[1] if self.axis == 0 else self.matrix.size // run
        kernel = kernel or ("columns" if self.axis == 0 else "rows")
        width = block_sizes.best(kernel, self.matrix.size)
        while width and (not runs or runs % (WARPGROUP * width)):
            width //= 2
        return width
