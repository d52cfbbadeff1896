"""Block scales: from the largest magnitude of a block to a scale and its reciprocal."""

import dataclasses
import math
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from fp4jax.numerics import exact
from fp4jax.numerics.formats import (
    E8M0,
    F32,
    SCALE_FORMATS,
    UE5M3,
    UE5M3_FN,
    Format,
)
from fp4jax.numerics.rounding import round_nearest

Rule = Literal["floor", "truncation_free", "even"]
_RULES = get_args(Rule)
# A scale of 3 mantissa bits, rounded down by half a step, lets elements overshoot by
# this.
_OVERSHOOT = 17 / 16
# Below these, an amax counts as zero: every reciprocal stays finite and normal.
_TINY_BLOCK = 2.0**-100
_TINY_TENSOR = 2.0**-90


@dataclasses.dataclass(frozen=True)
class Scale:
    """How the scale of a block follows from its amax.

    Attributes:
      format: `F32`, `E4M3`, `UE5M3`, `UE5M3_FN` or `E8M0`.
      rule: for `E8M0` only, how the power of two is chosen: "floor" is
        2^(floor(log2 amax) - emax) of OCP MX 1.0, "truncation_free"
        2^ceil(log2(amax / g_max)), "even" the floor of an amax first rounded to the
        element's mantissa. Default "truncation_free".
      pad: for formats of 3 mantissa bits, whether g_max is divided by 17/16 when the
        scale is computed, so that a scale rounded down never lets an element overshoot
        the grid, which would bias stochastic rounding. None means: where the
        quantizer rounds stochastically.
    """

    format: Format = F32
    rule: Rule | None = None
    pad: bool | None = None

    def __post_init__(self):
        if self.format not in SCALE_FORMATS:
            raise ValueError(
                f"Scale: format must be one of {SCALE_FORMATS}, got "
                f"format={self.format!r}."
            )
        if self.format == E8M0:
            if self.rule is None:
                object.__setattr__(self, "rule", "truncation_free")
            if self.rule not in _RULES:
                raise ValueError(
                    f"Scale: rule must be one of {_RULES}, got rule={self.rule!r}."
                )
        elif self.rule is not None:
            raise ValueError(
                "Scale: rule must be None unless format is E8M0, got "
                f"rule={self.rule!r} with format={self.format!r}."
            )
        if self.pad is not None and not isinstance(self.pad, bool):
            raise TypeError(f"Scale: pad must be a bool or None, got pad={self.pad!r}.")
        if self.pad and not self.rounds_mantissa:
            raise ValueError(
                "Scale: pad must not be set where the scale has no 3 mantissa bits, "
                f"got pad=True with format={self.format!r}."
            )

    @property
    def rounds_mantissa(self) -> bool:
        """Whether scales have 3 mantissa bits: a range to spare, and a rounding."""
        return self.format not in (F32, E8M0)

    def check_grid(self, grid: Format) -> None:
        """Raises if the rule has no meaning on a grid."""
        if self.rule == "floor" and grid.is_uniform:
            raise ValueError(
                f"Scale: rule must not be 'floor' with grid={grid!r}, whose largest "
                "exponent is a matter of convention. Use 'truncation_free' or 'even'."
            )


@dataclasses.dataclass(frozen=True)
class Fresh:
    """A tensor scale from the amax of the tensor at hand.

    s_enc = g_max target / amax_tensor

    Attributes:
      target: block-scale code that the largest block of the tensor gets: from 16 to the
        largest of the block-scale format.
    """

    target: float = 448.0

    def __post_init__(self):
        is_number = isinstance(self.target, float | int)
        if not is_number or not 16 <= self.target < math.inf:
            raise ValueError(
                "Fresh: target must be a finite number of at least 16, got "
                f"target={self.target!r}."
            )


def tensor_factor(amax: jax.Array, tensor_scale: Fresh, grid: Format) -> jax.Array:
    """Returns the factor s_enc that brings a tensor's block scales into their range.

    Args:
      amax: float32 scalar, the amax of the whole tensor.
      tensor_scale: the rule.
      grid: the element grid.

    Returns:
      Float32 scalar; 1 where amax is 0 or below 2^-90, NaN where it is not finite.
    """
    tiny = amax < _TINY_TENSOR
    factor = exact.divide(grid.max * tensor_scale.target, jnp.where(tiny, 1, amax))
    factor = jnp.where(tiny, jnp.float32(1), factor)
    return jnp.where(jnp.isfinite(amax), factor, jnp.nan)


def block_scale(
    amax: jax.Array,
    scale: Scale,
    grid: Format,
    *,
    pad: bool = False,
    factor: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns the scale of each block and the number its elements are multiplied by.

    scale = round(amax / g_max factor),  inv = 1 / (scale / factor)

    Args:
      amax: float32 amax of each block, >= 0; not finite gives a NaN scale.
      scale: the scale's format and rule.
      grid: the element grid.
      pad: whether g_max is divided by 17/16.
      factor: s_enc of a two-level scale, from `tensor_factor`; None means 1.

    Returns:
      (scale, inv), float32 of the shape of `amax`; `scale` is a member of the format.
    """
    if scale.format == E8M0:
        value, inverse = _power_of_two(amax, scale.rule, grid)
    elif scale.format == F32:
        value = jnp.where(amax < _TINY_BLOCK, 0, amax * np.float32(1 / grid.max))
        inverse = _reciprocal_or_zero(value)
    else:
        per_unit = np.float32((_OVERSHOOT if pad else 1) / grid.max)
        scaled = amax * (per_unit if factor is None else factor * per_unit)
        value = round_nearest(scaled, scale.format)
        if scale.format in (UE5M3, UE5M3_FN):
            # A code of 0 is replaced by the value 1: the block rounds to 0.
            value = jnp.where(value == 0, jnp.float32(1), value)
        decoded = value if factor is None else value * exact.divide(1.0, factor)
        inverse = _reciprocal_or_zero(decoded)
    finite = jnp.isfinite(amax)
    if factor is not None:
        finite &= jnp.isfinite(factor)
    return jnp.where(finite, value, jnp.nan), jnp.where(finite, inverse, jnp.nan)


def _reciprocal_or_zero(scale: jax.Array) -> jax.Array:
    """Returns 1/scale; 0 of zero and of subnormals, whose reciprocal may overflow."""
    is_normal = scale >= jnp.finfo(jnp.float32).tiny
    inverse = exact.divide(1.0, jnp.where(is_normal, scale, 1))
    return jnp.where(is_normal, inverse, 0)


def _power_of_two(amax: jax.Array, rule: Rule | None, grid: Format):
    bits = exact.bits_of(amax)
    if rule == "truncation_free":
        # ceil((bits(amax) - bits(g_max)) / 2^23) is ceil(log2(amax / g_max)).
        exponent = -((exact.bits_of(jnp.float32(grid.max)) - bits) >> 23)
    else:
        if rule == "even":
            bits = bits + (1 << (22 - grid.mantissa_bits))
        exponent = (bits >> 23) - 127 - grid.emax
    low, high = _exponent_range(grid)
    exponent = jnp.clip(exponent, low, high)
    return exact.pow2(exponent), exact.pow2(-exponent)


def _exponent_range(grid: Format) -> tuple[int, int]:
    """Returns the exponents that keep code times scale normal and finite in BF16."""
    low = -126 - (grid.emin - grid.mantissa_bits)
    return max(low, -125), min(127 - grid.emax, 125)
