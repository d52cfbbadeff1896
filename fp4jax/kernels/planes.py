"""The arithmetic of a fused quantization, on the planes of a tile.

Plane j of a tile holds element j of every run along the contraction axis. Held so,
rotation, amax and rounding are operations on whole planes: nothing moves between the
threads of a GPU, and what is computed is what `fp4jax.numerics` says, with the same
functions.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp4jax.numerics import Quantizer, exact, formats, hadamard, scaling
from fp4jax.numerics.instructions import PORTABLE, Portable
from fp4jax.numerics.packing import fits_half_a_byte

Plane = jax.Array


class Quantized(NamedTuple):
    """The planes of a quantized tile.

    Attributes:
      values: float32 members of the grid, one for each plane; zeros may have a sign,
        which `scaled` and `packed` drop.
      scales: float32 members of the scale's format, one for each block of planes.
      unrounded: what the values are the nearest to; None where bits were drawn.
    """

    values: tuple[Plane, ...]
    scales: tuple[Plane, ...]
    unrounded: tuple[Plane, ...] | None


def quantize(
    planes: Sequence[Plane],
    quantizer: Quantizer,
    *,
    size: int,
    signs: Sequence[float | jax.Array] | None = None,
    factor: tuple[jax.Array, jax.Array] | None = None,
    uniform: Callable[[int], tuple[Plane, Plane]] | None = None,
    across: Callable[[Plane], Plane] = lambda amax: amax,
    instructions: Portable = PORTABLE,
) -> Quantized:
    """Rotates, scales and rounds the planes of whole runs.

    Args:
      planes: float32 arrays of one shape, whole blocks of them.
      quantizer: of nearest or stochastic rounding, without candidates.
      size: planes of a block.
      signs: of the rotation: +1 and -1 where they are known, otherwise scalars.
      factor: of two levels, s_enc and 1 / s_enc, float32 scalars or planes.
      uniform: maps i to the random bits of planes 2i and 2i + 1.
      across: maps the amaxes of planes to those of blocks that lie in several threads.
      instructions: that round.
    """
    norm = np.float32(1)
    if signs is not None:
        planes, norm = _rotated(planes, signs)
    encode, decode = factor or (None, None)
    values: list[Plane] = []
    scales: list[Plane] = []
    for first in range(0, len(planes), size):
        block = planes[first : first + size]
        scale, inverse = scaling.block_scale(
            across(amax(block)) * norm,
            quantizer.scale,
            quantizer.grid,
            headroom=quantizer.headroom,
            factor=encode,
            inverse_factor=decode,
            instructions=instructions,
        )
        values += [plane * (inverse * norm) for plane in block]
        scales.append(scale)
    bits: list[Plane | None] = [None] * len(values)
    if uniform is not None:
        bits = [half for i in range(len(values) // 2) for half in uniform(i)]
    grid, rounded = quantizer.grid, []
    for t, u in zip(values, bits, strict=True):
        magnitude = jnp.abs(t)
        if u is None:
            magnitude = instructions.nearest(magnitude, grid)
        else:
            magnitude = instructions.stochastic(magnitude, u, grid)
        rounded.append(exact.with_sign_of(magnitude, t))
    unrounded = tuple(values) if uniform is None else None
    return Quantized(tuple(rounded), tuple(scales), unrounded)


def rotate(planes: Sequence[Plane], signs: Sequence[float | jax.Array]) -> list[Plane]:
    """Returns the planes of x H', of runs as long as there are signs.

    The butterflies are those of `fp4jax.numerics.hadamard`, in its order.
    """
    rotated, norm = _rotated(planes, signs)
    return [plane * norm for plane in rotated]


def _rotated(
    planes: Sequence[Plane], signs: Sequence[float | jax.Array]
) -> tuple[list[Plane], np.float32]:
    """Returns planes and what remains to multiply them by, a power of two."""
    size = len(signs)
    norm = np.float32(hadamard.norm(size))
    rotated: list[Plane] = []
    for first in range(0, len(planes), size):
        run = [
            _signed(p, s)
            for p, s in zip(planes[first : first + size], signs, strict=True)
        ]
        distance = 1
        while distance < size:
            for i in range(size):
                if not i & distance:
                    a, b = run[i], run[i | distance]
                    run[i], run[i | distance] = a + b, a - b
            distance *= 2
        rotated += run
    if math.frexp(norm)[0] == 0.5:
        return rotated, norm
    return [plane * norm for plane in rotated], np.float32(1)


def amax(planes: Sequence[Plane]) -> Plane:
    """Returns the largest magnitude across planes; NaN where one is."""
    return functools.reduce(jnp.maximum, map(jnp.abs, planes))


def operand(quantized: Quantized, dtype: jax.typing.DTypeLike) -> list[Plane]:
    """Returns values scale, the planes of the GEMM's input."""
    size = len(quantized.values) // len(quantized.scales)
    return [
        scaled(value, quantized.scales[i // size]).astype(dtype)
        for i, value in enumerate(quantized.values)
    ]


def scaled(value: Plane, scale: Plane) -> Plane:
    """Returns value scale, of which zero has no sign: one instruction."""
    return value * scale + np.float32(0)


def code_bits(grid: formats.Format) -> int:
    """Returns the bits that a code takes in memory."""
    return 4 if fits_half_a_byte(grid) else 8


def packed(
    quantized: Quantized,
    quantizer: Quantizer,
    bits: int,
    instructions: Portable = PORTABLE,
) -> list[Plane]:
    """Returns uint32 planes of codes, as many in each as `bits` have room for.

    Args:
      quantized: the planes.
      quantizer: what made them.
      bits: of an integer, 8 or 32; the first code is in its lowest.
      instructions: that find codes.
    """
    width = code_bits(quantizer.grid)
    how = quantizer.grid, width, bits // width
    return instructions.words(quantized.values, *how, quantized.unrounded)


def scale_codes(
    quantized: Quantized, quantizer: Quantizer, instructions: Portable = PORTABLE
) -> list[Plane]:
    """Returns scales as they are stored: int32 codes, or float32 scales themselves."""
    fmt = quantizer.scale.format
    if fmt == formats.F32:
        return list(quantized.scales)

    def code(scale: Plane) -> Plane:
        found = lax.bitcast_convert_type(instructions.code(scale, fmt), jnp.int32)
        assert fmt.nan_code is not None
        return jnp.where(jnp.isnan(scale), fmt.nan_code, found)

    return [code(scale) for scale in quantized.scales]


def _signed(plane: Plane, sign: float | jax.Array) -> Plane:
    if isinstance(sign, jax.Array):
        return plane * sign
    return plane if sign > 0 else -plane
