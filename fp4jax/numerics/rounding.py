"""Rounding to a format: nearest even, and stochastic with given bits."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp4jax.numerics import checks, exact
from fp4jax.numerics.formats import Format


@dataclasses.dataclass(frozen=True)
class Nearest:
    """Round to nearest, ties to the even code (RTNE)."""

    def __repr__(self) -> str:
        return "NEAREST"


@dataclasses.dataclass(frozen=True)
class Stochastic:
    """Stochastic rounding (SR): between a <= t <= b, up with (t - a) / (b - a).

    The probability is truncated to 16 bits. Beyond g_max values saturate.
    """


@dataclasses.dataclass(frozen=True)
class MSEden:
    """Nearest elements under stochastic scales, unbiased after a random rotation.

    `scale = SR(scale_block S),  S = <x, x> / <x, x_q>` over a group

    Elements keep the small error of RTNE; S undoes what they lose along the direction
    of the group, and rounding the corrected scales stochastically keeps that unbiased.
    See `eden`.

    Attributes:
      group: elements that share S, whole blocks of a rotated run.
      headroom: what g_max is divided by before scales are computed: 17/16, so that a
        scale rounded down does not clip, times 0.93, a little clipping that lessens the
        error.

    References: arXiv 2601.22813.
    """

    group: int = 128
    headroom: float = 17 / 16 * 0.93

    def __post_init__(self):
        if not checks.is_integer(self.group) or self.group < 1:
            raise ValueError(
                "MSEden: group must be an integer of at least 1, got "
                f"group={self.group!r}."
            )
        if not isinstance(self.headroom, float) or not 0.5 <= self.headroom <= 2:
            raise ValueError(
                "MSEden: headroom must be a float in [0.5, 2], got "
                f"headroom={self.headroom!r}."
            )


NEAREST = Nearest()
Rounding = Nearest | Stochastic | MSEden


def to_grid(t: jax.Array, grid: Format, bits: jax.Array | None = None) -> jax.Array:
    """Rounds scaled elements to signed members of a grid; zero has no sign.

    Args:
      t: float32.
      grid: the grid.
      bits: uint32 uniform in [0, 2^16), which round stochastically; None: to nearest.

    Returns:
      Float32 members of the grid.
    """
    magnitude = jnp.abs(t)
    if bits is None:
        magnitude = round_nearest(magnitude, grid)
    else:
        magnitude = round_stochastic(magnitude, bits, grid)
    return jnp.where((t < 0) & (magnitude > 0), -magnitude, magnitude)


def round_nearest(t: jax.Array, fmt: Format) -> jax.Array:
    """Rounds magnitudes to the nearest members of `fmt`, ties to the even code.

    Args:
      t: float32 magnitudes >= 0; beyond the format's largest they saturate, and a NaN
        gives the largest too (the scale must carry it).
      fmt: the format.

    Returns:
      Float32 members of the format.
    """
    t, step, inverse_step = _saturate(t, fmt)
    return lax.round(t * inverse_step, lax.RoundingMethod.TO_NEAREST_EVEN) * step


def round_stochastic(t: jax.Array, bits: jax.Array, fmt: Format) -> jax.Array:
    """Rounds magnitudes to one of the two members of `fmt` around them, unbiased.

    i = floor(t / step 2^16),  result = ((i + bits) >> 16) step

    Args:
      t: float32 magnitudes >= 0, as for `round_nearest`.
      bits: uint32 uniform in [0, 2^16).
      fmt: the format.

    Returns:
      Float32 members of the format.
    """
    t, step, inverse_step = _saturate(t, fmt)
    i = (t * inverse_step * 65536.0).astype(jnp.uint32)
    return ((i + bits) >> 16).astype(jnp.float32) * step


def clamp(t: jax.Array, fmt: Format) -> jax.Array:
    """Returns magnitudes of at most the format's largest, which a NaN becomes too."""
    return jnp.where(t < fmt.max, t, jnp.float32(fmt.max))


def binade(t: jax.Array, fmt: Format) -> jax.Array | np.float32:
    """Returns 2^e of clamped magnitudes around which steps are 2^(e - M)."""
    lowest = np.float32(2.0**fmt.emin)
    return lowest if fmt.is_uniform else jnp.maximum(exact.floor_pow2(t), lowest)


def _saturate(t: jax.Array, fmt: Format):
    """Clamps magnitudes; returns them, the step around each, and its reciprocal."""
    t = clamp(t, fmt)
    step = binade(t, fmt) * np.float32(2.0**-fmt.mantissa_bits)
    inverse = exact.inverse_pow2(step) if isinstance(step, jax.Array) else 1 / step
    return t, step, inverse
