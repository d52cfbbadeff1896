"""Fused quantization on NVIDIA GPUs, in Pallas Mosaic GPU."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fp4jax.kernels import planes
from fp4jax.kernels.devices import TILE_OF_SQUARES as TILE
from fp4jax.kernels.devices import WARPGROUP
from fp4jax.kernels.geometry import Geometry, Where
from fp4jax.kernels.quantize import matrix
from fp4jax.kernels.quantize.matrix import Scalars
from fp4jax.kernels.quantize.outputs import Output, Quantized
from fp4jax.kernels.runs import along
from fp4jax.kernels.squares import SIDES, Squares
from fp4jax.kernels.view import View
from fp4jax.numerics import F32, Quantizer

_MAX_RUN = 128


def quantize(
    x: jax.Array,
    quantizer: Quantizer,
    *,
    outputs: Sequence[Output],
    interpret: Any = None,
    **how: Any,
) -> Quantized:
    """Quantizes an array as `matrix.quantize` does, where `unsupported` is None."""

    def kernel(view: View, scalars: Scalars) -> dict[Output, jax.Array]:
        return quantize_matrix(
            view.matrix,
            quantizer,
            axis=view.axis,
            outputs=outputs,
            scalars=scalars,
            period=view.period,
            width=view.width(quantizer.multiple),
            interpret=interpret,
        )

    return matrix.quantize(x, quantizer, kernel, **how)


def unsupported(
    x: jax.Array, quantizer: Quantizer, *, axis: int, other: int | None = None
) -> str | None:
    """Returns what of a call `quantize` cannot do, or None."""
    run = quantizer.multiple
    if (why := matrix.unsupported(x, quantizer)) is not None:
        return why
    if quantizer.is_square:
        return _unsupported_squares(x, quantizer, axis, other)
    if run % 8 or run > _MAX_RUN:
        return f"a run must be a multiple of 8 up to {_MAX_RUN}, got {run}"
    if x.shape[axis] % run:
        return f"axis {axis} must be a multiple of {run}, got shape={x.shape}"
    if not View.of(x, axis).width(run):
        return f"there must be a multiple of {WARPGROUP} runs, got shape={x.shape}"
    return None


def _unsupported_squares(
    x: jax.Array, quantizer: Quantizer, axis: int, other: int | None
) -> str | None:
    if quantizer.block_size not in SIDES:
        return f"square blocks must be of {SIDES}, got {quantizer.block_size}"
    if quantizer.rotation is not None:
        return "square blocks must not be rotated"
    if (why := matrix.unsupported_axes(x, axis, other)) is not None:
        return why
    if not x.size or any(n % m for n, m in zip(x.shape[-2:], TILE, strict=True)):
        return f"the last two axes must be multiples of {TILE}, got shape={x.shape}"
    return None


def quantize_matrix(
    x: jax.Array,
    quantizer: Quantizer,
    *,
    axis: int,
    outputs: Sequence[Output],
    scalars: Scalars,
    period: int,
    width: int,
    interpret: Any = None,
) -> dict[Output, jax.Array]:
    """Quantizes a matrix in blocks along one axis of it.

    Args:
      x: float32 or bfloat16 [r, c].
      quantizer: of nearest or stochastic rounding, without candidates.
      axis: the contraction axis.
      outputs: what to write.
      scalars: further inputs.
      period: rows of each of several matrices that stand one above the other, where
        `axis` is 0.
      width: runs of each thread.
      interpret: as `plgpu.kernel` takes it.

    Returns:
      Of each output: the operand [r, c]; codes [r, c], of 4-bit grids half as many
      along `axis`, uint8; scales, one for each block.
    """
    geometry = _geometry(
        quantizer,
        shape=x.shape,
        axis=axis,
        period=period,
        width=width,
        interpret=bool(interpret),
    )
    arrays = scalars.arrays

    def kernel(x_ref, *refs):
        inputs = dict(zip(arrays, refs[: len(arrays)], strict=True))
        where = geometry.where()
        signs: Any = scalars.signs
        factor = uniform = None
        if "signs" in inputs:
            signs = [inputs["signs"][i] for i in range(arrays["signs"].size)]
        if "factor" in inputs:
            factor = inputs["factor"][0], inputs["factor"][1]
        if quantizer.is_stochastic:
            uniform = geometry.uniform(where, inputs["noise"])
        quantized = planes.quantize(
            geometry.load(x_ref, where),
            quantizer,
            signs=signs,
            factor=factor,
            uniform=uniform,
            size=geometry.planes_of_block,
            across=geometry.across,
            instructions=geometry.instructions,
        )
        for output, ref in zip(outputs, refs[len(arrays) :], strict=True):
            _store(output, ref, where, quantized, quantizer, geometry)

    found = geometry.run(
        kernel,
        x,
        *arrays.values(),
        out_type=[_out_type(output, quantizer, geometry) for output in outputs],
        interpret=interpret,
    )
    return {
        output: geometry.block_matrix(array)
        if output == Output.SCALES
        else geometry.matrix(array)
        for output, array in zip(outputs, found, strict=True)
    }


def _geometry(quantizer: Quantizer, *, width: int, **fields: Any) -> Geometry:
    fields["block"] = quantizer.block_size
    if quantizer.is_square:
        return Squares(**fields)
    return along(size=quantizer.multiple, width=width, **fields)


def _store(
    output: Output,
    ref: Any,
    where: Where,
    quantized: planes.Quantized,
    quantizer: Quantizer,
    geometry: Geometry,
) -> None:
    match output:
        case Output.OPERAND:
            operand = planes.operand(quantized, jnp.bfloat16)
            geometry.store(ref, where, operand)
        case Output.CODES:
            how = geometry.word, geometry.instructions
            words = planes.packed(quantized, quantizer, *how)
            geometry.store(ref, where, words)
        case Output.SCALES:
            codes = planes.scale_codes(quantized, quantizer, geometry.instructions)
            geometry.store_blocks(ref, where, codes)


def _out_type(
    output: Output, quantizer: Quantizer, geometry: Geometry
) -> jax.ShapeDtypeStruct:
    match output:
        case Output.OPERAND:
            return geometry.elements(16, jnp.bfloat16)
        case Output.CODES:
            return geometry.elements(planes.code_bits(quantizer.grid), jnp.uint8)
        case Output.SCALES:
            is_float = quantizer.scale.format == F32
            return geometry.blocks(jnp.float32 if is_float else jnp.uint8)
