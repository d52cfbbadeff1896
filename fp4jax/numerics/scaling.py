"""Block scales: from the largest magnitude of a block to a scale and its reciprocal."""

import dataclasses
import math
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from fp4jax.numerics import checks, exact
from fp4jax.numerics.formats import (
    E8M0,
    F32,
    SCALE_FORMATS,
    UE5M3,
    UE5M3_FN,
    Format,
)
from fp4jax.numerics.instructions import PORTABLE, Portable

Rule = Literal["floor", "truncation_free", "even"]
_RULES = get_args(Rule)
# A scale of 3 mantissa bits, rounded down by half a step, lets elements overshoot by
# this.
OVERSHOOT = 17 / 16
# Below these, an amax counts as zero: every reciprocal stays finite and normal.
TINY_BLOCK = 2.0**-100
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
      candidates: magnitudes of the grid that the amax of a block may be mapped to, such
        as (6.0, 4.0) on E2M1: each block takes the scale of the smallest mean absolute
        error, the first of equals. None is the largest magnitude alone.
      prescale: for `E8M0` only, a factor of at most 1 on elements before they are
        rounded, by which the result of the GEMM is divided: 3/4 keeps "floor" from
        clipping. None is 1.
    """

    format: Format = F32
    rule: Rule | None = None
    pad: bool | None = None
    candidates: tuple[float, ...] | None = None
    prescale: float | None = None

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
        if self.candidates is not None:
            self._check_candidates(self.candidates)
        if self.prescale is not None:
            self._check_prescale(self.prescale)

    def _check_candidates(self, candidates: tuple[float, ...]) -> None:
        if not isinstance(candidates, tuple) or len(set(candidates)) < 2:
            raise ValueError(
                "Scale: candidates must be a tuple of at least 2 magnitudes, got "
                f"candidates={candidates!r}."
            )
        if not self.rounds_mantissa or self.pad:
            raise ValueError(
                "Scale: candidates must be None unless the scale has 3 mantissa bits "
                f"and no pad, got format={self.format!r}, pad={self.pad!r}."
            )

    def _check_prescale(self, prescale: float) -> None:
        if self.format != E8M0:
            raise ValueError(
                "Scale: prescale must be None unless format is E8M0, got "
                f"prescale={prescale!r} with format={self.format!r}."
            )
        if not isinstance(prescale, float) or not 0.5 < prescale < 1:
            raise ValueError(
                f"Scale: prescale must lie in (0.5, 1), got prescale={prescale!r}."
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
        strangers = set(self.candidates or ()) - set(grid.magnitudes[1:])
        if strangers:
            raise ValueError(
                f"Scale: candidates must be magnitudes of grid={grid!r}, got "
                f"candidates={self.candidates}."
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
        _check_target(self)


@dataclasses.dataclass(frozen=True)
class Held:
    """A tensor scale from an amax that is sampled, then held for some steps.

    s_enc = g_max target / amax_held

    The amax of a linear layer's operand is taken at steps divisible by `every` and at
    first use; in between the operand is not read for it. Block scales stay those of
    the tensor at hand. Where no amax is given, as in `quantize` without `amax`, it is
    taken of the tensor.

    Attributes:
      every: steps between samples.
      target: as of `Fresh`; its distance to the largest block scale is the room for an
        operand that grows while its amax is held.
    """

    every: int = 50
    target: float = 448.0

    def __post_init__(self):
        _check_target(self)
        if not checks.is_integer(self.every) or self.every < 1:
            raise ValueError(
                f"Held: every must be an integer of at least 1, got "
                f"every={self.every!r}."
            )


TensorScale = Fresh | Held


def _check_target(tensor_scale: TensorScale) -> None:
    target = tensor_scale.target
    if not isinstance(target, float | int) or not 16 <= target < math.inf:
        raise ValueError(
            f"{type(tensor_scale).__name__}: target must be a finite number of at "
            f"least 16, got target={target!r}."
        )


def tensor_factor(
    amax: jax.Array, tensor_scale: TensorScale, g_max: float
) -> jax.Array:
    """Returns the factor s_enc that brings a tensor's block scales into their range.

    Args:
      amax: float32 scalar, the amax of the whole tensor.
      tensor_scale: the rule.
      g_max: the magnitude that the largest element is mapped to.

    Returns:
      Float32 scalar; 1 where amax is 0 or below 2^-90, NaN where it is not finite.
    """
    tiny = amax < _TINY_TENSOR
    factor = exact.divide(g_max * tensor_scale.target, jnp.where(tiny, 1, amax))
    factor = jnp.where(tiny, jnp.float32(1), factor)
    return jnp.where(jnp.isfinite(amax), factor, jnp.nan)


def block_scale(
    amax: jax.Array,
    scale: Scale,
    grid: Format,
    *,
    headroom: float = 1.0,
    factor: jax.Array | None = None,
    inverse_factor: jax.Array | None = None,
    instructions: Portable = PORTABLE,
) -> tuple[jax.Array, jax.Array]:
    """Returns the scale of each block and the number its elements are multiplied by.

    scale = round(amax headroom / g_max factor),  inv = prescale / (scale / factor)

    Args:
      amax: float32 amax of each block, >= 0; not finite gives a NaN scale.
      scale: the scale's format and rule.
      grid: the element grid.
      headroom: what g_max is divided by, for scales of 3 mantissa bits.
      factor: s_enc of a two-level scale, from `tensor_factor`; None means 1.
      inverse_factor: 1 / factor, correctly rounded, where it is known.
      instructions: that round and divide.

    Returns:
      (scale, inv), float32 of the shape of `amax`; `scale` is a member of the format.
    """
    if scale.format == E8M0:
        value, inverse = _power_of_two(amax, scale.rule, grid)
        if scale.prescale is not None:
            inverse = inverse * np.float32(scale.prescale)
    elif scale.format == F32:
        value = jnp.where(amax < TINY_BLOCK, 0, amax * np.float32(1 / grid.max))
        inverse = _reciprocal_or_zero(value, instructions)
    else:
        per_unit = np.float32(headroom / grid.max)
        scaled = amax * (per_unit if factor is None else factor * per_unit)
        value, inverse = _rounded_scale(
            scaled, scale.format, factor, inverse_factor, instructions
        )
    return _poisoned(amax, factor, value, inverse)


def candidate_scale(
    amax: jax.Array, scale: Scale, grid: Format, candidate: float, factor: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Returns `block_scale` for an amax that is mapped to a lesser magnitude.

    scale = round(((amax / g_max) factor) (g_max / candidate))

    The order of operations is that of Transformer Engine's four-over-six.
    """
    tiny = amax < TINY_BLOCK
    base = exact.divide(jnp.where(tiny, 1, amax), jnp.float32(grid.max)) * factor
    scaled = jnp.where(tiny, 0, base * np.float32(grid.max / candidate))
    value, inverse = _rounded_scale(scaled, scale.format, factor)
    return _poisoned(amax, factor, value, inverse)


def _rounded_scale(
    scaled: jax.Array,
    fmt: Format,
    factor: jax.Array | None,
    inverse_factor: jax.Array | None = None,
    instructions: Portable = PORTABLE,
) -> tuple[jax.Array, jax.Array]:
    """Rounds scales to a format of 3 mantissa bits; returns them and 1 / decoded."""
    value = instructions.nearest(scaled, fmt)
    if replaces_zero(fmt):
        value = jnp.where(value == 0, jnp.float32(1), value)
    if factor is None:
        return value, _reciprocal_or_zero(value, instructions)
    if inverse_factor is None:
        inverse_factor = instructions.reciprocal(factor)
    return value, _reciprocal_or_zero(value * inverse_factor, instructions)


def replaces_zero(fmt: Format) -> bool:
    """Returns whether the value 1 stands for a code of 0: the block rounds to 0."""
    return fmt in (UE5M3, UE5M3_FN)


def _poisoned(amax, factor, value, inverse) -> tuple[jax.Array, jax.Array]:
    """Returns scale and inverse, NaN where an amax is not finite."""
    finite = amax < jnp.inf
    if factor is not None:
        finite &= jnp.abs(factor) < jnp.inf
    return jnp.where(finite, value, jnp.nan), jnp.where(finite, inverse, jnp.nan)


def _reciprocal_or_zero(scale: jax.Array, instructions: Portable) -> jax.Array:
    """Returns 1/scale; 0 of zero and of subnormals, whose reciprocal may overflow."""
    is_normal = scale >= jnp.finfo(jnp.float32).tiny
    inverse = instructions.reciprocal(jnp.where(is_normal, scale, 1))
    return jnp.where(is_normal, inverse, 0)


def _power_of_two(amax: jax.Array, rule: Rule | None, grid: Format):
    bits = exact.bits_of(amax)
    if rule == "truncation_free":
        # ceil((bits(amax) - bits(g_max)) / 2^23) is ceil(log2(amax / g_max)).
        exponent = -((exact.constant_bits(grid.max) - bits) >> 23)
    else:
        if rule == "even":
            bits = bits + (1 << (22 - grid.mantissa_bits))
        exponent = (bits >> 23) - 127 - grid.emax
    low, high = exponent_range(grid)
    exponent = jnp.clip(exponent, low, high)
    return exact.pow2(exponent), exact.pow2(-exponent)


def exponent_range(grid: Format) -> tuple[int, int]:
    """Returns the exponents that keep code times scale normal and finite in BF16."""
    low = -126 - (grid.emin - grid.mantissa_bits)
    return max(low, -125), min(127 - grid.emax, 125)
