"""Products of groups of rows on NVIDIA Hopper GPUs, in Pallas Mosaic GPU."""

import dataclasses
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from fp4jax.kernels.grouped_matmul.program import Program, Work, own_rows
from fp4jax.kernels.grouped_matmul.segments import Segments, Sums
from fp4jax.kernels.tile import ROWS


@dataclasses.dataclass(frozen=True, kw_only=True)
class Rows(Program):
    """y = x w of the group of each row.

    Attributes:
      axis: of w that is contracted: 1, or 2.
      count: number of groups.
    """

    axis: int
    count: int

    def __call__(
        self,
        x: jax.Array,
        w: jax.Array,
        segments: Segments,
        factors: tuple[jax.Array, ...],
    ) -> jax.Array:
        """Returns [m, n].

        Args:
          x: bfloat16 [m, k].
          w: bfloat16 [e, k, n] or [e, n, k].
          segments: of rows, of at most those of a tile.
          factors: float32 [e], what the sums of a group are multiplied by, in turn.
        """
        tile = self.tile
        work = Work(
            shape=(len(x), w.shape[3 - self.axis]),
            loaded=((tile.m, tile.k), self._cut(tile.k, tile.n)),
            shared=0,
            most=self._results(len(segments.first), w),
            number=self._number,
            load=self._load,
            multiply=self._multiply,
        )
        return self._call(work, x, w, *segments, *factors)

    def _cut(self, of_k: Any, of_n: Any) -> tuple[Any, Any]:
        return (of_k, of_n) if self.axis == 1 else (of_n, of_k)

    def _number(self, *refs: Any) -> Any:
        _, w, _, _, _, number, *_ = refs
        return self._results(number[0], w)

    def _results(self, segments: Any, w: Any) -> Any:
        strips = (segments + (self.tile.snake - 1)) // self.tile.snake
        return strips * self.tile.snake * self._columns(w)

    def _columns(self, w: Any) -> int:
        return w.shape[3 - self.axis] // (self.tile.n * self.tile.peers)

    def _at(self, i: Any, w: Any) -> tuple[Any, Any]:
        """Returns the segment and first column of a result: in strips of segments."""
        wide = self.tile.snake
        strip = lax.div(i, wide * self._columns(w))
        rest = lax.rem(i, wide * self._columns(w))
        column = lax.div(rest, wide) * self.tile.peers + lax.axis_index("peer")
        column = pl.multiple_of(column * self.tile.n, self.tile.n)
        return strip * wide + lax.rem(rest, wide), column

    def _of(
        self, segment: Any, x: Any, segments: Segments
    ) -> tuple[Any, Any, Any, Any]:
        """Returns steps along k, first row, rows and group; no rows beyond the last."""
        last = segments.number[0] - 1
        at = lax.min(segment, last)
        group = segments.group[at]
        rows = jnp.where(segment > last, 0, segments.rows[at])
        some = (rows > 0) & (group < self.count)  # zeros where rows have no group
        steps = jnp.where(some, x.shape[1] // self.tile.k, 0)
        return steps, pl.multiple_of(segments.first[at], self.piece), rows, group

    def _load(self, step, i, ring, x, w, *refs):
        segments, tile = Segments(*refs[:4]), self.tile
        segment, column = self._at(i, w)
        steps, first, _, group = self._of(segment, x, segments)

        def load(s, _):
            k = pl.ds(pl.multiple_of(s * tile.k, tile.k), tile.k)
            part = self._cut(k, pl.ds(column, tile.n))
            parts = x.at[pl.ds(first, tile.m), k], w.at[group, *part]
            ring.load(step + s, [(slice(None), parts)])

        lax.fori_loop(0, steps, load, None)
        return step + steps

    def _multiply(self, step, i, ring, boxes, x, w, *refs):
        segments, (*factors, out) = Segments(*refs[:4]), refs[4:]
        segment, column = self._at(i, w)
        steps, first, rows, group = self._of(segment, x, segments)
        # Zeros without a group stay so, whatever the factors are.
        at, has_group = lax.min(group, self.count - 1), group < self.count
        scales = [jnp.where(has_group, factor[at], 0.0) for factor in factors]
        own = own_rows()
        rows = rows - own

        def accumulate(sums):
            def multiply(a, b):
                b = b if self.axis == 1 else b.transpose((1, 0))
                plgpu.wgmma(sums, a.at[pl.ds(own, ROWS)], b)

            lax.fori_loop(0, steps, lambda s, _: ring.use(step + s, multiply), None)
            return sums[...]

        found = pl.run_scoped(accumulate, plgpu.ACC((ROWS, self.tile.n), jnp.float32))

        def send(box, columns):
            wide = _wide(column, columns)
            for at, size, wanted in self._parts(rows):

                @pl.when(wanted)
                def _(at=at, size=size):
                    row = pl.multiple_of(first + own + at, self.piece)
                    place = out.at[pl.ds(row, size), wide]
                    plgpu.copy_smem_to_gmem(
                        box.at[pl.ds(at, size)], place, commit_group=False
                    )

        self._write(found, scales, boxes, send)
        return step + steps

    def _parts(self, rows: Any) -> list[tuple[int, int, Any]]:
        """Returns what is written at once: all rows of a box, or pieces of fewer."""
        pieces = range(0, ROWS, self.piece) if self.piece < ROWS else ()
        some = [(at, self.piece, (rows > at) & (rows < ROWS)) for at in pieces]
        return [(0, ROWS, rows >= ROWS), *some]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weights(Program):
    """dw = sum of x^T dy over the rows of each group."""

    def __call__(
        self,
        x: jax.Array,
        dy: jax.Array,
        sums: Sums,
        factors: tuple[jax.Array, ...],
    ) -> jax.Array:
        """Returns [e, k, n], zeros of a group without rows.

        Args:
          x: bfloat16 [m, k].
          dy: bfloat16 [m, n].
          sums: of rows, of at most those of a step.
          factors: as of `Rows`.
        """
        tile = self.tile
        e, k, n = shape = len(sums.bounds) // 2, x.shape[1], dy.shape[1]
        results = e * (k // (tile.m * tile.peers)) * (n // tile.n)
        work = Work(
            shape=shape,
            loaded=((tile.k, tile.m), (tile.k, tile.n)),
            shared=1,
            most=results,
            number=lambda *_: results,
            load=self._load,
            multiply=self._multiply,
        )
        return self._call(work, x, dy, *sums, *factors)

    def _at(self, i: Any, out: Any) -> tuple[Any, Any, Any]:
        """Returns the group, the first row and the first column of a result."""
        _, k, n = out.shape
        wide, high = n // self.tile.n, k // (self.tile.m * self.tile.peers)
        row = lax.rem(lax.div(i, wide), high) * self.tile.peers + lax.axis_index("peer")
        row = pl.multiple_of(row * self.tile.m, self.tile.m)
        column = pl.multiple_of(lax.rem(i, wide) * self.tile.n, self.tile.n)
        return lax.div(i, wide * high), row, column

    def _load(self, step, i, ring, x, dy, first, rows, bounds, *refs):
        tile, (group, row, column) = self.tile, self._at(i, refs[-1])
        start, others, end = (bounds[2 * group + j] for j in range(3))

        def parts(at, size):
            m = pl.ds(pl.multiple_of(at, self.piece), size)
            return x.at[m, pl.ds(row, tile.m)], dy.at[m, pl.ds(column, tile.n)]

        def whole(s, _):
            ring.load(step + s, [(slice(None), parts(first[start + s], tile.k))])

        def short(s, _):
            # Zeros beyond the array stand for rows that the segment does not have.
            at, size = first[start + s], rows[start + s]
            pieces = [
                (pl.ds(j, self.piece), jnp.where(j < size, at + j, x.shape[0]))
                for j in range(0, tile.k, self.piece)
            ]
            pieces = [(to, parts(at, self.piece)) for to, at in pieces]
            ring.load(step + s, pieces, short=True)

        lax.fori_loop(0, others - start, whole, None)
        lax.fori_loop(others - start, end - start, short, None)
        return step + end - start

    def _multiply(self, step, i, ring, boxes, x, dy, first, rows, bounds, *refs):
        del x, dy, first, rows
        *factors, out = refs
        group, row, column = self._at(i, out)
        scales = [factor[group] for factor in factors]
        start, others, end = (bounds[2 * group + j] for j in range(3))
        own = own_rows()

        def accumulate(sums):
            def add(a, b):
                plgpu.wgmma(sums, a.at[:, pl.ds(own, ROWS)].transpose((1, 0)), b)

            whole = lambda s, _: ring.use(step + s, add)
            short = lambda s, _: ring.use(step + s, add, short=True)
            lax.fori_loop(0, others - start, whole, None)
            lax.fori_loop(others - start, end - start, short, None)
            return sums[...]

        found = pl.run_scoped(accumulate, plgpu.ACC((ROWS, self.tile.n), jnp.float32))

        def send(box, columns):
            wide = _wide(column, columns)
            place = out.at[group, pl.ds(row + own, ROWS), wide]
            plgpu.copy_smem_to_gmem(box, place, commit_group=False)

        self._write(found, scales, boxes, send)
        return step + end - start


def _wide(column: Any, part: slice) -> Any:
    """Returns some columns of those that begin with one."""
    size = part.stop - part.start
    return pl.ds(pl.multiple_of(column + part.start, size), size)
