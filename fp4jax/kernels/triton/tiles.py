"""The tiles of a matrix, one for each program of a grid."""

import dataclasses
import math

from fp4jax.kernels import block_sizes
from fp4jax.kernels.triton.launch import THREADS

_WIDEST = 16  # bytes that a thread loads at once
_ELEMENTS = 64  # of a thread, or they do not all stay in registers


@dataclasses.dataclass(frozen=True)
class Tiles:
    """How a matrix is read, a tile at a time.

    A tile is [f, k]: k runs along the contraction axis. Where a thread shall hold whole
    runs, each of its loads is a piece of them.

    Attributes:
      shape: of the matrix, [r, c].
      tile: rows and columns of a tile, powers of two.
      axis: the contraction axis: 0 or 1.
      period: rows of each of the matrices that stand one above the other, where the
        contraction axis is 0.
      runs: of each row of the array, where the contraction axis is 1 and rows of the
        matrix are runs.
      piece: bytes of a load along the contraction axis, where that is 1; None: all of
        a tile.
      width: elements of a load along the columns, where these are a free axis.
    """

    shape: tuple[int, ...]
    tile: tuple[int, ...]
    axis: int
    period: int
    runs: int = 1
    piece: int | None = None
    width: int | None = None

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of programs."""
        rows, columns = (-(-n // t) for n, t in zip(self.shape, self.tile, strict=True))
        return rows, columns

    @property
    def is_whole(self) -> tuple[bool, bool]:
        """Whether no tile reaches beyond the last row, and the last column."""
        rows, columns = (n % t == 0 for n, t in zip(self.shape, self.tile, strict=True))
        return rows, columns

    @property
    def is_wide(self) -> bool:
        """Whether elements of a tile can be more than 2^31 apart."""
        return self.tile[0] * self.shape[1] >= 2**31

    @property
    def programs(self) -> int:
        """Programs of the grid."""
        return math.prod(self.grid)

    def per(self, free: int, contracted: int) -> "Tiles":
        """Returns those of an array with one element for so many of the matrix."""
        each = (contracted, free) if self.axis == 0 else (free, contracted)
        shape, tile = (
            (n[0] // each[0], n[1] // each[1]) for n in (self.shape, self.tile)
        )
        return dataclasses.replace(self, shape=shape, tile=tile)

    def elements(self, bits: int) -> int:
        """Returns how many elements along the contraction axis are loaded at once."""
        size = self.tile[self.axis]
        if self.piece is None:
            return size
        return min(size, 8 * self.piece // bits)


def of_runs(
    shape: tuple[int, ...],
    *,
    axis: int,
    size: int,
    period: int,
    width: int | None = None,
) -> Tiles:
    """Returns tiles of whole runs, which threads hold.

    Args:
      shape: of the matrix.
      axis: that of the runs.
      size: elements of a run, which divide it.
      period: as of `Tiles`.
      width: runs of a thread, if it has room for them; None: those of `block_sizes`.
    """
    kernel = "triton_columns" if axis == 0 else "triton_rows"
    width = width or block_sizes.best(kernel, math.prod(shape))
    width = max(1, min(width, _ELEMENTS // size))
    rows, columns = shape
    if axis == 0:
        return Tiles(shape, (size, THREADS * width), 0, period, width=width)
    runs = columns // size
    tile = THREADS * width, size
    return Tiles((rows * runs, size), tile, 1, period, runs, piece=_WIDEST)
