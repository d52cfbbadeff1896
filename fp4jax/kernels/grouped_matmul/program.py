"""Programs that multiply on NVIDIA Hopper GPUs, each several tiles of a result.

One warpgroup loads tiles ahead of two others, which multiply; what is next is loaded
while a result is written.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from fp4jax.kernels.tile import ROWS, WARPGROUPS, Tile
from fp4jax.kernels.warpgroups import LINE, launch, swizzled

_LOADING, _MULTIPLYING = 40, 232  # registers of a thread


class Work(NamedTuple):
    """What programs compute.

    Attributes:
      shape: of the result.
      loaded: shapes of the tiles of both operands that a step takes.
      shared: which of these peers load together.
      most: tiles of the result, counted once for all peers.
      number: `number(*refs)`, those that there are.
      load: `load(step, i, ring, *refs)` loads for one of them and returns the next
        step.
      multiply: likewise `multiply(step, i, ring, boxes, *refs)`.
    """

    shape: tuple[int, ...]
    loaded: tuple[tuple[int, int], tuple[int, int]]
    shared: int
    most: int
    number: Callable[..., Any]
    load: Callable[..., Any]
    multiply: Callable[..., Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Program:
    """What is static about a product.

    Attributes:
      dtype: of the result.
      piece: rows of which none are of two groups.
      tile: of a program.
      interpret: as `plgpu.kernel` takes it.
    """

    dtype: Any
    piece: int
    tile: Tile
    interpret: Any = None

    def _call(self, work: Work, *inputs: Any) -> jax.Array:
        """Runs a kernel of some inputs."""
        return launch(
            functools.partial(self._kernel, work),
            *inputs,
            out_type=jax.ShapeDtypeStruct(work.shape, self.dtype),
            tiles=work.most,
            peers=self.tile.peers,
            interpret=self.interpret,
        )

    def _kernel(self, work: Work, *refs: Any) -> None:
        def scope(boxes, *of_ring):
            ring = Ring(*of_ring, tile=self.tile, shared=work.shared)
            warpgroup = lax.axis_index("warpgroup")

            @pl.when(warpgroup == WARPGROUPS)
            def _():
                plgpu.set_max_registers(_LOADING, action="decrease")
                ring.drain(_each(work.number(*refs), work.load, ring, *refs))

            @pl.when(warpgroup < WARPGROUPS)
            def _():
                plgpu.set_max_registers(_MULTIPLYING, action="increase")
                of = ring, boxes.at[warpgroup], *refs
                ring.free(_each(work.number(*refs), work.multiply, *of))
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)

        memory = self._boxes(), *self._ring(work)
        pl.run_scoped(scope, *memory, collective_axes="warpgroup")

    def _boxes(self) -> Any:
        """Returns the shared memory of results on their way, two for each warpgroup."""
        width = LINE // jnp.dtype(self.dtype).itemsize
        shape = WARPGROUPS, 2, ROWS, width
        return plgpu.SMEM(shape, self.dtype, transforms=swizzled(width, self.dtype))

    def _ring(self, work: Work) -> list[Any]:
        """Returns the shared memory and the barriers of a ring."""
        tile, emptied = self.tile, plgpu.Barrier
        if tile.peers > 1:
            emptied = functools.partial(plgpu.ClusterBarrier, collective_axes=("peer",))
        pieces = 2 * tile.k // self.piece
        return [
            *(
                plgpu.SMEM(
                    (tile.stages, *shape),
                    jnp.bfloat16,
                    transforms=swizzled(shape[1], jnp.bfloat16),
                )
                for shape in work.loaded
            ),
            plgpu.Barrier(num_arrivals=2, num_barriers=tile.stages),
            plgpu.Barrier(num_arrivals=pieces, num_barriers=tile.stages),
            emptied(num_arrivals=WARPGROUPS, num_barriers=tile.stages),
        ]

    def _write(
        self,
        found: jax.Array,
        scales: Sequence[jax.Array],
        boxes: Any,
        places: Callable[..., Any],
    ) -> None:
        """Writes the sums of a warpgroup, times each scale in turn.

        Box by box, one while the last is sent.
        """
        for scale in scales:
            found = found * scale
        width = boxes.shape[2]
        for i in range(self.tile.n // width):
            columns = slice(i * width, (i + 1) * width)
            box = boxes.at[i % 2]
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            box[...] = found[:, columns].astype(self.dtype)
            plgpu.commit_smem()
            places(box, columns)
            plgpu.commit_smem_to_gmem_group()


class Ring(NamedTuple):
    """Tiles on their way: filled in turn, multiplied, and filled again.

    Attributes:
      a: of the first operand, [stages, ...].
      b: of the second one.
      full: barriers at which tiles have come.
      of_short: those at which their pieces have, of short segments.
      empty: those at which it has been multiplied.
      tile: of a program.
      shared: which of the two all peers of a cluster load together.
    """

    a: Any
    b: Any
    full: Any
    of_short: Any
    empty: Any
    tile: Tile
    shared: int

    def load(
        self, step: Any, pieces: Sequence[tuple[Any, Any]], *, short: bool = False
    ) -> None:
        """Fills a slot when it is empty, of where to and what from, of both."""
        slot = lax.rem(step, self.tile.stages)
        full = self.of_short if short else self.full

        @pl.when(step >= self.tile.stages)
        def _():
            plgpu.barrier_wait(self.empty.at[slot])

        for place, sources in pieces:
            for i, source in enumerate(sources):
                together = self.tile.peers > 1 and i == self.shared
                plgpu.copy_gmem_to_smem(
                    source,
                    (self.a, self.b)[i].at[slot, place],
                    full.at[slot],
                    collective_axes=("peer",) if together else None,
                )

    def use(self, step: Any, multiply: Callable[..., None], *, short: bool = False):
        """Multiplies the tiles of a slot when they have come.

        The tensor cores go on while the next ones are waited for: a slot is free when
        those of the step after it have begun.
        """
        slot = lax.rem(step, self.tile.stages)
        full = self.of_short if short else self.full
        plgpu.barrier_wait(full.at[slot])
        multiply(self.a.at[slot], self.b.at[slot])
        plgpu.wgmma_wait(1)
        self.free(step)

    def free(self, steps: Any) -> None:
        """Has the slot of the last of so many steps, if any, filled again."""

        @pl.when(steps > 0)
        def _():
            plgpu.barrier_arrive(self.empty.at[lax.rem(steps - 1, self.tile.stages)])

    def drain(self, steps: Any) -> None:
        """Waits until all is multiplied, here and by peers."""
        for slot in range(self.tile.stages):

            @pl.when(slot < steps)
            def _(slot=slot):
                plgpu.barrier_wait(self.empty.at[slot])


def _each(number: Any, body: Callable[..., Any], *refs: Any) -> Any:
    """Calls `body(step, i, *refs)` of the tiles of a program; returns all steps."""
    program, programs = lax.axis_index("program"), lax.axis_size("program")
    own = lax.div(number - program + (programs - 1), jnp.int32(programs))
    of = lambda i, step: body(step, program + i * programs, *refs)
    return lax.fori_loop(0, own, of, jnp.int32(0))


def own_rows() -> Any:
    """Returns the first row of a warpgroup among those of a tile."""
    return pl.multiple_of(lax.axis_index("warpgroup") * ROWS, ROWS)
