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
from jaxlib.mlir.dialects import arith, llvm, memref, vector

from fp4jax.kernels.devices import WARPGROUP

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
            [element for vector in row for element in _widened(vector)]
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


def e4m3_word(planes: Sequence[jax.Array], lane: Layout, interpret: bool) -> jax.Array:
    """Returns uint32 words of four E4M3, that of the first plane in the lowest bits."""
    shape = planes[0].shape
    if interpret:
        elements = jnp.stack(planes, axis=-1).astype(jnp.float8_e4m3fn)
        return lax.bitcast_convert_type(elements, jnp.uint32)
    word = plgpu.ShapeDtypeStruct(shape, jnp.uint32, layout=lane.pallas)

    @plgpu.inline_mgpu(arg_types=(lane.pallas,) * 4, return_type=word)
    def convert(_, *planes):
        held = zip(*(plane.registers.reshape(-1) for plane in planes), strict=True)
        return lane.array([_e4m3(*four) for four in held], shape, jnp.uint32)

    return convert(*planes)


def look_up(ref: Any, index: jax.Array, lane: Layout, interpret: bool) -> jax.Array:
    """Returns the elements of a vector in global memory at int32 indices."""
    if interpret:
        return ref[...][index]
    shape, dtype = index.shape, ref.dtype
    out = plgpu.ShapeDtypeStruct(shape, dtype, layout=lane.pallas)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), lane.pallas), return_type=out)
    def apply(_, ref, index):
        element, size = utils.dtype_to_ir_type(dtype), lane.mosaic.vector_length

        def at(i: ir.Value) -> ir.Value:
            return memref.load(ref, [arith.index_cast(ir.IndexType.get(), i)])

        kind = ir.VectorType.get((size,), element)
        vectors = [
            vector.from_elements(kind, [at(i) for i in _elements_of(held)])
            for held in index.registers.flat
        ]
        return lane.array(vectors, shape, dtype)

    return apply(ref, index)


def widen(plane: jax.Array, lane: Layout) -> jax.Array:
    """Returns bfloat16 in float32."""
    floats = plgpu.ShapeDtypeStruct(plane.shape, jnp.float32, layout=lane.pallas)

    @plgpu.inline_mgpu(arg_types=(lane.pallas,), return_type=floats)
    def apply(_, plane):
        held = plane.registers.flat
        kind = ir.VectorType.get(held[0].type.shape, ir.F32Type.get())
        vectors = [vector.from_elements(kind, _widened(x)) for x in held]
        return lane.array(vectors, floats.shape, jnp.float32)

    return apply(plane)


def add_down(
    plane: jax.Array, offset: jax.Array | np.float32, lane: Layout
) -> jax.Array:
    """Returns plane + offset, float32 rounded toward zero."""
    if not isinstance(offset, jax.Array):
        offset = plgpu.layout_cast(jnp.full(plane.shape, offset), lane.pallas)
    return _each("add.rz.f32 $0, $1, $2;", lane, plane, offset)


def reciprocal(plane: jax.Array, lane: Layout) -> jax.Array:
    """Returns 1 / plane of float32, correctly rounded."""
    return _each("rcp.rn.f32 $0, $1;", lane, plane)


def high_halves(first: jax.Array, second: jax.Array, lane: Layout) -> jax.Array:
    """Returns uint32 of the upper 16 bits of two, the first's above."""
    return _each("prmt.b32 $0, $2, $1, 0x7632;", lane, first, second)


def _each(instruction: str, lane: Layout, *planes: jax.Array) -> jax.Array:
    """Returns a plane of what an instruction makes of each element, of their type."""
    shape, dtype = planes[0].shape, planes[0].dtype
    out = plgpu.ShapeDtypeStruct(shape, dtype, layout=lane.pallas)
    register = "f" if dtype == jnp.float32 else "r"
    constraints = ",".join([f"={register}", *[register] * len(planes)])

    def of_vectors(*vectors: ir.Value) -> ir.Value:
        kind: Any = vectors[0].type
        found: list[Any] = [
            llvm.inline_asm(kind.element_type, x, instruction, constraints)
            for x in zip(*map(_elements_of, vectors), strict=True)
        ]
        return vector.from_elements(kind, found)

    @plgpu.inline_mgpu(arg_types=(lane.pallas,) * len(planes), return_type=out)
    def apply(_, *planes):
        held = zip(*(plane.registers.flat for plane in planes), strict=True)
        return lane.array([of_vectors(*x) for x in held], shape, dtype)

    return apply(*planes)


def _widened(x: ir.Value) -> list[ir.Value]:
    """Returns the elements of a vector, of bfloat16 by an instruction each."""
    kind: Any = x.type
    (size,), f32 = kind.shape, ir.F32Type.get()
    if not isinstance(kind.element_type, ir.BF16Type):
        return _elements_of(x)
    if size % 2:
        return _elements_of(arith.extf(ir.VectorType.get((size,), f32), x))
    i32 = ir.IntegerType.get_signless(32)
    words = utils.bitcast(x, ir.VectorType.get((size // 2,), i32))

    def constant(value: int) -> ir.Value:
        attribute = ir.IntegerAttr.get(i32, value)
        splat = ir.DenseElementsAttr.get_splat(words.type, attribute)
        return arith.constant(words.type, splat)

    halves = (
        arith.shli(words, constant(16)),
        arith.andi(words, constant(-(2**16))),
    )
    floats = ir.VectorType.get((size // 2,), f32)
    pairs = zip(*(_elements_of(utils.bitcast(h, floats)) for h in halves), strict=True)
    return [element for pair in pairs for element in pair]


def _elements_of(x: ir.Value) -> list[ir.Value]:
    kind: Any = x.type
    return [
        vector.extract(x, dynamic_position=[], static_position=[i])
        for i in range(kind.shape[0])
    ]


_E4M3 = """{
.reg .b16 low, high;
cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
mov.b32 $0, {low, high};
}"""


def _e4m3(*vectors: ir.Value) -> ir.Value:
    i32 = ir.IntegerType.get_signless(32)
    elements = [_elements_of(v)[0] for v in vectors]
    word: Any = llvm.inline_asm(i32, elements, _E4M3, "=r,f,f,f,f")
    return vector.broadcast(ir.VectorType.get((1,), i32), word)


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
