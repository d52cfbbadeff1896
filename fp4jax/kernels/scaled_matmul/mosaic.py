"""Packed codes times bfloat16 on NVIDIA Hopper GPUs, in Pallas Mosaic GPU.

One warpgroup loads tiles ahead of two others. Each of these decodes 64 rows of the
packed operand into registers, where `wgmma` takes them from, while the tensor cores
work for the other one.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from fp4jax.kernels import registers
from fp4jax.kernels.scaled_matmul import decode
from fp4jax.kernels.scaled_matmul.fragments import (
    BYTES,
    BYTES_DOWN,
    ELEMENTS,
    OF_ROWS,
    across,
    pairs,
    spread,
)
from fp4jax.kernels.tile import CHUNK, ROWS, WARPGROUPS, Tile
from fp4jax.kernels.warpgroups import launch, swizzled
from fp4jax.numerics import F32
from fp4jax.numerics.formats import Format

_BOX = 64  # rows and columns of the result that are written at once


@dataclasses.dataclass(frozen=True)
class Product:
    """What is static about a product.

    Attributes:
      grid: of the codes.
      scale: format of the scales.
      block: elements of a scale.
      axis: the contraction axis of the codes.
      other_axis: that of the other operand.
      swapped: whether the result is [n, m].
      dtype: of the result.
      tile: of a program.
      interpret: as `plgpu.kernel` takes it.
    """

    grid: Format
    scale: Format
    block: int
    axis: int
    other_axis: int
    swapped: bool
    dtype: Any
    tile: Tile
    interpret: Any = None

    def __call__(
        self, codes: jax.Array, scales: jax.Array, other: jax.Array, factors: jax.Array
    ) -> jax.Array:
        """Returns the product.

        Args:
          codes: uint8 [c / 2, m] or [m, c / 2], of two each.
          scales: [c / block, m], uint8 codes or float32.
          other: bfloat16 [c, n] or [n, c].
          factors: float32 [f], what the float32 sums are multiplied by, in turn.
        """
        m, n = codes.shape[1 - self.axis], other.shape[1 - self.other_axis]
        peers = self.tile.peers
        tiles = m // (self.tile.m * peers), n // self.tile.n
        return launch(
            functools.partial(self._kernel, tiles, factors.size),
            codes,
            scales,
            other,
            factors,
            out_type=jax.ShapeDtypeStruct(self._place(n, m), self.dtype),
            tiles=tiles[0] * tiles[1],
            peers=peers,
            interpret=self.interpret,
        )

    def _kernel(self, tiles, count: int, codes, scales, other, factors, out) -> None:
        """Computes tiles of the result, in every program some of them."""
        tile = self.tile
        nothing: Any = lambda *_: None
        pipeline = self._pipeline(nothing, nothing, other)

        def scope(buffers, boxes, *memory):
            warpgroup = lax.axis_index("warpgroup")

            @plgpu.nd_loop((tiles[0] * tiles[1],), collective_axes="program")
            def loop(info):
                i, j = plgpu.planar_snake(info.index[0], tiles, 1, tile.snake)
                i = i * tile.peers + lax.axis_index("peer")
                rows, columns = pl.ds(i * tile.m, tile.m), pl.ds(j * tile.n, tile.n)

                def compute(multiply):
                    found = self._sums(multiply, factors, count)
                    own = pl.ds(i * tile.m + warpgroup * ROWS, ROWS)
                    place = out.at[self._place(columns, own)]
                    self._write(found.astype(self.dtype), boxes.at[warpgroup], place)

                step = functools.partial(self._step, memory)
                self._pipeline(step, compute, other)(
                    codes.at[_cut(rows, self.axis)],
                    scales.at[:, rows],
                    other.at[_cut(columns, self.other_axis)],
                    allocations=buffers,
                )

        pl.run_scoped(
            scope,
            pipeline.get_allocations(codes, scales, other),
            plgpu.SMEM(
                (WARPGROUPS, 2, _BOX, _BOX),
                self.dtype,
                transforms=swizzled(_BOX, self.dtype),
            ),
            *self._memory(),
            collective_axes="warpgroup",
        )
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def _sums(self, multiply: Any, factors: Any, count: int) -> jax.Array:
        """Returns what a pipeline adds up, times every factor."""

        def accumulate(sums):
            multiply(sums)
            return sums[...]

        shape = plgpu.ACC((ROWS, self.tile.n), jnp.float32)
        found = pl.run_scoped(accumulate, shape)
        for i in range(count):
            found = found * factors[i]
        return found

    def _pipeline(self, step: Any, compute: Any, other: Any) -> Any:
        """Returns what brings tiles along the contraction axis to `step`, in order."""
        tile = self.tile

        def spec(axis, free, size, transforms=(), shared=()):
            at = (lambda k: (k, 0)) if axis == 0 else (lambda k: (0, k))
            how = {"transforms": transforms, "collective_axes": shared}
            return plgpu.BlockSpec(_cut(free, axis, size), at, **how)

        # Whole rows of codes would meet in the same banks.
        down = swizzled(ROWS, jnp.uint8) if self.axis == 0 else ()
        of_other = swizzled(_BOX, other.dtype)
        shared = ("peer",) if tile.peers > 1 else ()
        return plgpu.emit_pipeline_warp_specialized(
            step,
            grid=(other.shape[self.other_axis] // tile.k,),
            memory_registers=40,
            in_specs=[
                spec(self.axis, tile.m, tile.k // 2, down),
                spec(0, tile.m, tile.k // self.block),
                spec(self.other_axis, tile.n, tile.k, of_other, shared),
            ],
            wg_axis="warpgroup",
            num_compute_wgs=WARPGROUPS,
            max_concurrent_steps=tile.stages,
            compute_context=compute,
        )

    def _step(self, memory, _, codes, scales, other, sums):
        """Adds the product of tiles that have come."""
        warpgroup = lax.axis_index("warpgroup")
        rows = pl.ds(warpgroup * ROWS, ROWS)
        for first in range(0, self.tile.k, CHUNK):
            a: Any = self._decoded(codes, scales, rows, first)
            if memory:  # interpreted, `wgmma` takes no registers
                memory[0][warpgroup] = a
                a = memory[0].at[warpgroup]
            b = other.at[_cut(slice(None), self.other_axis, pl.ds(first, CHUNK))]
            if self.other_axis == 1:
                b = b.transpose((1, 0))
            plgpu.wgmma(sums, a, b)
        plgpu.wgmma_wait(0)
        return sums

    def _memory(self) -> list[Any]:
        shape = WARPGROUPS, ROWS, CHUNK
        return [plgpu.SMEM(shape, jnp.bfloat16)] if self.interpret else []

    def _decoded(self, codes, scales, rows, first: int) -> jax.Array:
        """Returns bfloat16 [64, 64] of the packed operand, for `wgmma`."""
        interpret = bool(self.interpret)
        where = _cut(rows, self.axis, pl.ds(first // 2, CHUNK // 2))
        layout = BYTES_DOWN if self.axis == 0 else BYTES
        words = registers.load(codes.at[where], layout)
        if self.axis == 0:
            words = across(words, interpret)
        blocks = range(first // self.block, (first + CHUNK) // self.block)
        found = [registers.load(scales.at[i, rows], OF_ROWS) for i in blocks]
        as_pairs = functools.partial(pairs, interpret=interpret)
        of_words: Any = decode.one(self.grid)
        if self.scale != F32:
            found = [
                decode.scale_words(code.astype(jnp.uint32), self.scale, self.grid)
                for code in found
            ]
            of_words = spread(found, self.block // 2, BYTES)
        x = decode.elements(words.astype(jnp.uint32), of_words, self.grid, as_pairs)
        if self.scale == F32:
            x = x.astype(jnp.float32) * spread(found, self.block, ELEMENTS)
        return x.astype(jnp.bfloat16)

    def _write(self, found: jax.Array, boxes: Any, place: Any) -> None:
        """Writes the tile of a warpgroup box by box, one while the last is sent."""
        for i in range(self.tile.n // _BOX):
            columns = slice(i * _BOX, (i + 1) * _BOX)
            box, part = boxes.at[i % 2], found[:, columns]
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            if self.swapped:
                part = plgpu.layout_cast(part, plgpu.Layout.WGMMA_TRANSPOSED)
                box.transpose((1, 0))[...] = part
            else:
                box[...] = part
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(box, place.at[self._place(columns, slice(None))])

    def _place(self, of_n: Any, of_m: Any) -> tuple[Any, Any]:
        return (of_n, of_m) if self.swapped else (of_m, of_n)


def _cut(free: Any, axis: int, along: Any = slice(None)) -> tuple[Any, Any]:
    """Returns the index of a matrix whose contraction axis is first or last."""
    return (along, free) if axis == 0 else (free, along)
