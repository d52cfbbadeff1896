"""How the elements of a tile lie in the registers of a warpgroup."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import fragmented_array as fragments
from jax.experimental.mosaic.gpu import utils

WARPGROUP, WARP = 128, 32
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


def lane_layout(width: int, square: int | None = None) -> Layout:
    """Returns the layout in which a thread holds `width` neighbors of each run of them.

    Args:
      width: elements of a thread that lie side by side.
      square: of arrays [n, square]; None: of arrays [n].
    """
    if square is None:
        tiles = ((WARPGROUP * width,), (WARP * width,), (width,))
        return Layout.of(tiles, warp=-3, lanes=(-2,))
    group, warp = WARPGROUP * width // square, WARP * width // square
    tiles = ((group, square), (warp, square), (1, width))
    return Layout.of(tiles, warp=-6, lanes=(-4, -3))


def run_layout(size: int, dtype: jax.typing.DTypeLike) -> Layout:
    """Returns the layout in which a thread holds rows of `size` elements."""
    vector = min(size, _WIDEST // jnp.dtype(dtype).itemsize)
    tiles = ((WARPGROUP, size), (WARP, size), (vector,))
    return Layout.of(tiles, warp=-5, lanes=(-3,))


def split(x: jax.Array, layout: Layout, shape: tuple[int, ...], lane: Layout):
    """Returns the columns of x [n, size], held in `run_layout`, each of some shape."""
    size, count, x_dtype = x.shape[1], x.shape[0] // WARPGROUP, x.dtype
    column = plgpu.ShapeDtypeStruct(shape, x.dtype, layout=lane.pallas)

    @plgpu.inline_mgpu(arg_types=(layout.pallas,), return_type=(column,) * size)
    def columns(_, x):
        vectors = x.registers.reshape(count, -1)
        vector = size // vectors.shape[1]

        def element(i: int, j: int):
            k = j % vector
            return utils.vector_slice(vectors[i, j // vector], slice(k, k + 1))

        return tuple(
            lane.array([element(i, j) for i in range(count)], shape, x_dtype)
            for j in range(size)
        )

    return list(columns(x))


def join(columns: Sequence[jax.Array], layout: Layout, lane: Layout) -> jax.Array:
    """Returns [n, size] in `run_layout` of its columns: the inverse of `split`."""
    size, dtype = len(columns), columns[0].dtype
    shape = (columns[0].size, size)
    whole = plgpu.ShapeDtypeStruct(shape, dtype, layout=layout.pallas)

    @plgpu.inline_mgpu(arg_types=(lane.pallas,) * size, return_type=whole)
    def rows(_, *columns):
        held = [column.registers.reshape(-1) for column in columns]
        vector = min(size, _WIDEST // jnp.dtype(dtype).itemsize)
        vectors = [
            utils.vector_concat([held[j + k][i] for k in range(vector)])
            for i in range(len(held[0]))
            for j in range(0, size, vector)
        ]
        return layout.array(vectors, shape, dtype)

    return rows(*columns)


def load(ref: Any, layout: Layout) -> jax.Array:
    """Reads from global memory, whole lines of it or not."""
    read: Any = plgpu.load
    return read(ref, layout=layout.pallas, optimized=False)


def store(ref: Any, x: jax.Array) -> None:
    """Writes to global memory, whole lines of it or not."""
    write: Any = getattr(plgpu, "store", None)
    if write is None:  # before JAX 0.12
        ref[...] = x
    else:
        write(ref, x, optimized=False)
