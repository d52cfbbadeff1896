"""What threads make of each element that they hold, in instructions of NVIDIA GPUs."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm, memref, vector

from fp4jax.kernels.registers import Layout
from fp4jax.kernels.vectors import elements_of, widened

_E4M3 = """{
.reg .b16 low, high;
cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
mov.b32 $0, {low, high};
}"""


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
            vector.from_elements(kind, [at(i) for i in elements_of(held)])
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
        vectors = [vector.from_elements(kind, widened(x)) for x in held]
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
            for x in zip(*map(elements_of, vectors), strict=True)
        ]
        return vector.from_elements(kind, found)

    @plgpu.inline_mgpu(arg_types=(lane.pallas,) * len(planes), return_type=out)
    def apply(_, *planes):
        held = zip(*(plane.registers.flat for plane in planes), strict=True)
        return lane.array([of_vectors(*x) for x in held], shape, dtype)

    return apply(*planes)


def _e4m3(*vectors: ir.Value) -> ir.Value:
    i32 = ir.IntegerType.get_signless(32)
    elements = [elements_of(v)[0] for v in vectors]
    word: Any = llvm.inline_asm(i32, elements, _E4M3, "=r,f,f,f,f")
    return vector.broadcast(ir.VectorType.get((1,), i32), word)
