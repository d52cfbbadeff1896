"""Number formats: one table of element grids and of block-scale formats.

Every format is a minifloat: magnitudes m 2^(e - M) for an integer m < 2^(M+1) and an
exponent e >= emin, where the lowest binade also holds the subnormals. The uniform grids
are the case of a single binade. The code of a magnitude, (e - emin) 2^M + m, is then
its IEEE-style bit pattern.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp4jax.numerics import exact


@dataclasses.dataclass(frozen=True)
class Format:
    """A set of magnitudes and their codes.

    Attributes:
      name: how it prints and how JSON spells it.
      exponent_bits: exponent bits of the code.
      mantissa_bits: mantissa bits of the code, M.
      emin: exponent of the lowest binade; steps there are 2^(emin - M).
      max: largest finite magnitude, g_max.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    emin: int
    max: float

    @property
    def magnitude_bits(self) -> int:
        """Bits of a code without the sign."""
        return self.exponent_bits + self.mantissa_bits

    @property
    def emax(self) -> int:
        """Exponent of the largest magnitude."""
        return math.frexp(self.max)[1] - 1

    @property
    def is_uniform(self) -> bool:
        """Whether all steps are equal."""
        return self.exponent_bits == 1

    @property
    def nan_code(self) -> int | None:
        """The magnitude code that means NaN; formats below 7 bits have none."""
        return (1 << self.magnitude_bits) - 1 if self.magnitude_bits >= 7 else None

    @property
    def magnitudes(self) -> tuple[float, ...]:
        """All finite magnitudes, ascending; the position is the code."""
        codes = range(1 << self.magnitude_bits)
        return tuple(m for m in map(self._magnitude, codes) if m <= self.max)

    def _magnitude(self, code: int) -> float:
        field = max(code >> self.mantissa_bits, 1)
        mantissa = code - ((field - 1) << self.mantissa_bits)
        return mantissa * 2.0 ** (self.emin - self.mantissa_bits + field - 1)

    def __repr__(self) -> str:
        return self.name


# Element grids.
E2M1 = Format("E2M1", 2, 1, emin=0, max=6.0)
# E1M2 and symmetric INT4 are this grid times a step that the scale absorbs.
UNIFORM = Format("UNIFORM", 1, 2, emin=2, max=7.0)
# Two bits, {-4, 0, 4}: the coarsest grid, against which the others are judged. A unit
# of 4 keeps the reciprocal of every float32 scale normal.
INT2 = Format("INT2", 1, 0, emin=2, max=4.0)
# E2M1 without its magnitudes above 2, times 2 for the same reason.
E2M1_TO_2 = Format("E2M1_TO_2", 2, 1, emin=1, max=4.0)
E4M3 = Format("E4M3", 4, 3, emin=-6, max=448.0)
E5M2 = Format("E5M2", 5, 2, emin=-14, max=57344.0)

# Block-scale formats; E4M3 serves as one too, its sign unused.
UE5M3 = Format("UE5M3", 5, 3, emin=-14, max=61440.0)
UE5M3_FN = Format("UE5M3_FN", 5, 3, emin=-14, max=114688.0)
# Code 0, 2^-127, is subnormal in float32; no rule emits it and it reads as 0.
E8M0 = Format("E8M0", 8, 0, emin=-126, max=2.0**127)
F32 = Format("F32", 8, 23, emin=-126, max=float(jnp.finfo(jnp.float32).max))

GRIDS = (E2M1, UNIFORM, INT2, E2M1_TO_2, E4M3, E5M2)
SCALE_FORMATS = (F32, E4M3, UE5M3, UE5M3_FN, E8M0)


def encode_magnitude(x: jax.Array, fmt: Format) -> jax.Array:
    """Encodes magnitudes that are members of the format.

    code = (e - emin) 2^M + x 2^(M - e),  e = max(floor(log2 x), emin)

    Args:
      x: float32 members of `fmt`; NaN where the format has a NaN code.
      fmt: any format of at most 8 magnitude bits.

    Returns:
      uint8 codes of the same shape.
    """
    return magnitude_code(x, fmt).astype(jnp.uint8)


def magnitude_code(x: jax.Array, fmt: Format) -> jax.Array:
    """Returns `encode_magnitude` in int32."""
    mantissa_bits, emin = fmt.mantissa_bits, fmt.emin
    if fmt.is_uniform:
        of_steps = exact.integer_of(x * np.float32(2.0 ** (mantissa_bits - emin)))
        return lax.bitcast_convert_type(of_steps, jnp.int32)
    # From the lowest binade up, both terms stand in the float32 pattern. What is below
    # does when it is brought there, where it counts 2^mantissa_bits more.
    lowest = np.float32(2.0**emin)
    is_below = x < lowest
    field = exact.bits_of(jnp.where(is_below, x + lowest, x)) >> (23 - mantissa_bits)
    first = (emin + 126) << mantissa_bits
    code = field - jnp.where(is_below, first + (1 << mantissa_bits), first)
    if fmt.nan_code is not None:
        code = jnp.where(jnp.isnan(x), fmt.nan_code, code)
    return code


def decode_magnitude(code: jax.Array, fmt: Format) -> jax.Array:
    """Decodes codes to float32 magnitudes: the inverse of `encode_magnitude`."""
    code = code.astype(jnp.int32)
    field = jnp.maximum(code >> fmt.mantissa_bits, 1)
    mantissa = code - ((field - 1) << fmt.mantissa_bits)
    step = exact.pow2(field - 1 + fmt.emin)
    x = mantissa.astype(jnp.float32) * 2.0**-fmt.mantissa_bits * step
    return x if fmt.nan_code is None else jnp.where(code == fmt.nan_code, jnp.nan, x)


def encode(x: jax.Array, grid: Format) -> jax.Array:
    """Encodes signed members of a grid as sign-magnitude uint8; -0 becomes +0."""
    return signed_code(x, grid).astype(jnp.uint8)


def signed_code(x: jax.Array, grid: Format) -> jax.Array:
    """Returns `encode` in int32."""
    magnitude = magnitude_code(jnp.abs(x), grid)
    return jnp.where(x < 0, magnitude | (1 << grid.magnitude_bits), magnitude)


def decode(code: jax.Array, grid: Format) -> jax.Array:
    """Decodes sign-magnitude codes to float32 values."""
    sign = jnp.uint8(1 << grid.magnitude_bits)
    magnitude = decode_magnitude(code & (sign - jnp.uint8(1)), grid)
    return jnp.where((code & sign) != 0, -magnitude, magnitude)
