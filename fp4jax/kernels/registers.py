"""How the elements of a tile lie in the registers of a warpgroup."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu import fragmented_array as fragments
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import vector

from fp4jax.kernels.devices import WARPGROUP
from fp4jax.kernels.vectors import widened

WARP = 32
PATCH = 4, 8  # rows and columns of a square block that a thread holds
_WIDEST = 16  # bytes that a thread loads at once


@dataclasses.dataclass(frozen=True)
class Layout:
    """A tiled layout, as Mosaic has it and as Pallas takes it."""

    mosaic: fragments.TiledLayout

    @classmethod
    def of(cls, tiles, *, warp: int, lanes: tuple[int, ...]) -> "Layout":
        """Returns the layout of nested tiles; vectors lie along the last dimension."""
        layout = fragments.TiledLayout(
            fragments.Tiling(tiles),
            warp_dims=(warp,),
            lane_dims=lanes,
            vector_dim=-1,
            _check_canonical=False,
        )
        return cls(layout.canonicalize())

    @property
    def pallas(self) -> Any:
        """Returns it for `plgpu.load` and `plgpu.layout_cast`."""
        layout = self.mosaic
        return plgpu.Layout.TILED(
            layout.tiling, layout.warp_dims, layout.lane_dims, layout.vector_dim
        )

    def array(self, registers: Sequence, shape: tuple[int, ...], dtype):
        """Returns the array whose registers are these."""
        is_integer = jnp.issubdtype(dtype, jnp.integer)
        held = np.asarray(registers, dtype=object)
        return fragments.FragmentedArray(
            _registers=held.reshape(self.mosaic.registers_shape(shape)),
            _layout=self.mosaic,
            _is_signed=jnp.issubdtype(dtype, jnp.signedinteger) if is_integer else None,
        )


def lane_layout(width: int, group: int | None = None) -> Layout:
    """Returns the layout in which a thread holds `width` neighbors of each run of them.

    Args:
      width: elements of a thread that lie side by side.
      group: threads that stand together, of arrays [n, group]; None: of arrays [n].
    """
    if group is None:
        tiles = ((WARPGROUP * width,), (WARP * width,), (width,))
        return Layout.of(tiles, warp=-3, lanes=(-2,))
    tiles = ((WARPGROUP * width // group, group), (WARP * width // group, group))
    return Layout.of((*tiles, (1, width)), warp=-6, lanes=(-4, -3))


def run_layout(size: int, dtype: jax.typing.DTypeLike) -> Layout:
    """Returns the layout in which a thread holds rows of `size` elements."""
    tiles = ((WARPGROUP, size), (WARP, size), (_vector(size, dtype),))
    return Layout.of(tiles, warp=-5, lanes=(-3,))


def patch_layout(side: int, size: int, dtype: jax.typing.DTypeLike) -> Layout:
    """Returns the layout of one row of the patches of a tile, of square blocks.

    Args:
      side: of a square in elements.
      size: of the row of a patch, in elements of the array.
      dtype: of the array, [8, 16 size].
    """
    square = side // PATCH[0], side // PATCH[1]
    tiles = ((8, 16 * size), (8, 4 * size), (square[0], square[1] * size), (1, size))
    tiles = (*tiles, (1, _vector(size, dtype)))
    return Layout.of(tiles, warp=-9, lanes=(-8, -7, -6, -5))


def column_layout(side: int) -> Layout:
    """Returns the layout of one column of the patches, as rows [16, 32] of bytes."""
    square = side // PATCH[1], side // PATCH[0] * 4
    tiles = ((16, 32), (4, 32), square, (1, 4))
    return Layout.of(tiles, warp=-8, lanes=(-5, -6, -3, -4))


def split(x: jax.Array, size: int, layout: Layout, shape, lane: Layout):
    """Returns the elements of each thread as planes of float32.

    Args:
      x: float32 or bfloat16, of which each thread holds rows of `size` elements.
      size: the number of planes.
      layout: of x.
      shape: of a plane.
      lane: its layout.
    """
    count, dtype = math.prod(shape) // WARPGROUP, jnp.float32
    plane = plgpu.ShapeDtypeStruct(shape, dtype, layout=lane.pallas)

    @plgpu.inline_mgpu(arg_types=(layout.pallas,), return_type=(plane,) * size)
    def planes(_, x):
        of_threads = [
            [element for vector in row for element in widened(vector)]
            for row in x.registers.reshape(count, -1)
        ]
        kind = ir.VectorType.get((1,), ir.F32Type.get())
        return tuple(
            lane.array([vector.broadcast(kind, e) for e in elements], shape, dtype)
            for elements in zip(*of_threads, strict=True)
        )

    return list(planes(x))


def join(
    planes: Sequence[jax.Array],
    layout: Layout,
    lane: Layout,
    shape: tuple[int, ...],
    dtype: Any,
) -> jax.Array:
    """Returns the array of which each thread holds planes: the inverse of `split`.

    Args:
      planes: of elements, or of integers that hold several each.
      layout: of the array.
      lane: of a plane.
      shape: of the array.
      dtype: of the array.
    """
    planes = _elements(planes, math.prod(shape) // planes[0].size, dtype)
    whole = plgpu.ShapeDtypeStruct(shape, dtype, layout=layout.pallas)

    @plgpu.inline_mgpu(arg_types=(lane.pallas,) * len(planes), return_type=whole)
    def array(_, *planes):
        held = [plane.registers.reshape(-1) for plane in planes]
        vector, element = layout.mosaic.vector_length, utils.dtype_to_ir_type(dtype)
        per = vector * jnp.dtype(dtype).itemsize * 8 // utils.bitwidth(held[0][0].type)
        kind = ir.VectorType.get((vector,), element)
        vectors = [
            utils.bitcast(utils.vector_concat([h[i] for h in held[j : j + per]]), kind)
            for i in range(len(held[0]))
            for j in range(0, len(held), per)
        ]
        return layout.array(vectors, shape, dtype)

    return array(*planes)


def held(planes: Sequence[jax.Array], count: int, dtype: Any) -> jax.Array:
    """Returns what `join` joins, [*plane, count], where kernels are interpreted."""
    x = jnp.stack(_elements(planes, count, dtype), axis=-1)
    if x.dtype != dtype:
        x = lax.bitcast_convert_type(x, dtype)
    return x.reshape(*planes[0].shape, count)


def _elements(planes: Sequence[jax.Array], count: int, dtype: Any):
    """Returns planes as a type, unless they hold several elements of it each."""
    if len(planes) < count:
        return planes
    return [plane.astype(dtype) for plane in planes]


def _vector(size: int, dtype: jax.typing.DTypeLike) -> int:
    """Returns the neighbors that a thread reads or writes at once."""
    return min(size, _WIDEST // jnp.dtype(dtype).itemsize)


def load(ref: Any, layout: Layout | Any) -> jax.Array:
    """Reads from global memory, whole lines of it or not."""
    read: Any = plgpu.load
    pallas = layout.pallas if isinstance(layout, Layout) else layout
    return read(ref, layout=pallas, optimized=False)


def store(ref: Any, x: jax.Array) -> None:
    """Writes to global memory, whole lines of it or not."""
    write: Any = getattr(plgpu, "store", None)
    if write is None:  # before JAX 0.12
        ref[...] = x
    else:
        write(ref, x, optimized=False)
