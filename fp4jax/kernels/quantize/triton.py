"""Fused quantization on NVIDIA GPUs, in Triton."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from fp4jax.kernels.quantize import matrix
from fp4jax.kernels.quantize.matrix import Prepared, Scalars
from fp4jax.kernels.quantize.outputs import Output, Quantized
from fp4jax.kernels.quantize.way import Inputs, Way
from fp4jax.kernels.triton import arithmetic, memory
from fp4jax.kernels.triton.launch import launch
from fp4jax.kernels.triton.tiles import Tiles, of_runs
from fp4jax.kernels.view import View
from fp4jax.numerics import F32, Quantizer
from fp4jax.numerics.packing import fits_half_a_byte

_F32 = tl.constexpr(F32)
_fits_half_a_byte = triton.constexpr_function(fits_half_a_byte)
_RUNS = (8, 16, 32, 64, 128)
_SIDES = (8, 16, 32, 64)
_TILE_OF_SQUARES = 32, 128  # as large as Mosaic's, to which nothing is padded here


def quantize(
    x: jax.Array, way: Way, inputs: Inputs, *, capability: int | None = None
) -> Quantized:
    """Quantizes an array as `reference.quantize` does, where `unsupported` is None."""
    prepared, quantizer = Prepared.of(x, way, inputs), way.quantizer
    view, scalars = prepared.view, prepared.scalars
    tiles, outputs = _tiles(view, quantizer), way.outputs
    return prepared.quantized(
        quantize_matrix(view.matrix, quantizer, tiles, outputs, scalars, capability)
    )


def unsupported(x: jax.Array, way: Way) -> str | None:
    """Returns what of a call `quantize` cannot do, or None."""
    quantizer = way.quantizer
    if (why := matrix.unsupported(x, quantizer)) is not None:
        return why
    run, size = quantizer.multiple, quantizer.block_size
    if quantizer.is_square and size not in _SIDES:
        return f"square blocks must be of {_SIDES}, got {size}"
    if quantizer.is_square:
        return matrix.unsupported_axes(x, way)
    if run not in _RUNS:
        return f"a run must be of {_RUNS}, got {run}"
    return None


def _tiles(view: View, quantizer: Quantizer) -> Tiles:
    """Returns what a program quantizes."""
    shape, size = view.matrix.shape, quantizer.multiple
    if quantizer.is_square:
        rows, columns = _TILE_OF_SQUARES
        return Tiles(shape, (max(rows, size), columns), view.axis, view.period)
    return of_runs(shape, axis=view.axis, size=size, period=view.period)


def quantize_matrix(
    x: jax.Array,
    quantizer: Quantizer,
    tiles: Tiles,
    outputs: Sequence[Output],
    scalars: Scalars,
    capability: int | None = None,
) -> dict[Output, jax.Array]:
    """Returns the outputs of a matrix, as many elements as they have.

    Args:
      x: float32 or bfloat16 [r, c].
      quantizer: of nearest or stochastic rounding, without candidates.
      tiles: of the matrix.
      outputs: what to write.
      scalars: further inputs.
      capability: as of `launch`.
    """
    is_float, size = quantizer.scale.format == F32, quantizer.block_size
    per_code = 2 if fits_half_a_byte(quantizer.grid) else 1
    types = {
        Output.OPERAND: (tiles, jnp.bfloat16),
        Output.CODES: (tiles.per(1, per_code), jnp.uint8),
        Output.SCALES: (
            tiles.per(size if quantizer.is_square else 1, size),
            jnp.float32 if is_float else jnp.uint8,
        ),
    }
    found = launch(
        quantize_tile,
        x,
        memory.words(scalars.arrays),
        # Of what is not written there is one element.
        out_types=[
            jax.ShapeDtypeStruct(of.shape if output in outputs else (1,), dtype)
            for output, (of, dtype) in types.items()
        ],
        programs=tiles.programs,
        capability=capability,
        QUANTIZER=quantizer,
        TILES=tiles,
        SIGNS=None if "signs" in scalars.arrays else scalars.signs,
        TOKENS=scalars.tokens is not None,
        FACTORS=0 if scalars.factor is None else scalars.factor.size // 2,
        WRITES=tuple(output in outputs for output in types),
    )
    arrays = dict(zip(types, found, strict=True))
    return {output: arrays[output] for output in outputs}


@triton.jit
def quantize_tile(
    x,
    words,
    operand,
    codes,
    scales,
    QUANTIZER: tl.constexpr,
    TILES: tl.constexpr,
    SIGNS: tl.constexpr,
    TOKENS: tl.constexpr,
    FACTORS: tl.constexpr,
    WRITES: tl.constexpr,
):
    """Quantizes this program's tile.

    Args:
      x: the matrix.
      words: noise, factor, signs and tokens, as far as there are such.
      operand: an output.
      codes: likewise.
      scales: likewise.
      QUANTIZER: of nearest or stochastic rounding, without candidates.
      TILES: of the matrix.
      SIGNS: of the rotation, where they are not among the words.
      TOKENS: whether there are such.
      FACTORS: how many of both there are.
      WRITES: whether each of the outputs is written.
    """
    GRID: tl.constexpr = QUANTIZER.grid
    SIZE: tl.constexpr = QUANTIZER.block_size
    FREE: tl.constexpr = SIZE if QUANTIZER.is_square else 1
    tile = memory.load(x, TILES).to(tl.float32)
    norm, factor, inverse_factor, rest = 1.0, None, None, words
    if QUANTIZER.is_stochastic:
        rest += 4
    if QUANTIZER.tensor_scale is not None:
        factor = memory.of_blocks(rest, FACTORS, FREE, SIZE, TILES)
        rest += FACTORS
        inverse_factor = memory.of_blocks(rest, FACTORS, FREE, SIZE, TILES)
        rest += FACTORS
    if QUANTIZER.rotation is not None:
        signs = memory.signs(rest, SIGNS, tile.shape[1], QUANTIZER.rotation.size)
        tile, norm = arithmetic.rotate(tile, signs, QUANTIZER.rotation.size)
        if SIGNS is None:
            rest += QUANTIZER.rotation.size
    scale, inverse = arithmetic.block_scale(
        arithmetic.amax(tile, FREE, SIZE) * norm, QUANTIZER, factor, inverse_factor
    )
    t = tile * arithmetic.spread(inverse * norm, FREE, SIZE)
    if QUANTIZER.is_stochastic:
        uniform = memory.uniform(words, rest if TOKENS else None, TILES)
        values = arithmetic.round_stochastic(t, uniform, GRID)
    else:
        values = arithmetic.round_nearest(t, GRID)
    if WRITES[0]:
        product = values * arithmetic.spread(scale, FREE, SIZE)
        memory.store(operand, product, TILES)
    if WRITES[1]:
        found = arithmetic.signed_code(values, GRID)
        if _fits_half_a_byte(GRID):
            memory.store(codes, arithmetic.packed(found), TILES.per(1, 2))
        else:
            memory.store(codes, found, TILES)
    if WRITES[2]:
        FORMAT: tl.constexpr = QUANTIZER.scale.format
        if FORMAT != _F32:
            scale = arithmetic.scale_code(scale, FORMAT)
        memory.store(scales, scale, TILES.per(FREE, SIZE))
