"""Quantization of an array in blocks: the one algorithm behind every recipe."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax

from fp4jax.numerics import (
    blocks,
    checks,
    exact,
    hadamard,
    random_bits,
    rounding,
    scaling,
)
from fp4jax.numerics.quantizer import Quantizer
from fp4jax.numerics.sites import Site


@dataclasses.dataclass(frozen=True)
class Blocks:
    """A quantized array, split into blocks.

    Attributes:
      values: float32 members of the grid, axes split by `tiling`.
      scale: float32 members of the scale's format, 1 on the axes inside a block.
      tensor_scale: float32 scalar that multiplies every scale, or None.
      signs: float32 signs of the rotation, or None.
      tiling: how the axes were split.
    """

    values: jax.Array
    scale: jax.Array
    tensor_scale: jax.Array | None
    signs: jax.Array | None
    tiling: blocks.Tiling

    def operand(self, dtype: jax.typing.DTypeLike) -> jax.Array:
        """Returns values scale, joined: the input of the GEMM, no tensor scale yet."""
        return self.tiling.join(exact.cast(self.values * self.scale, dtype))


def quantize_blocks(
    x: jax.Array,
    quantizer: Quantizer,
    *,
    axis: int,
    other: int | None = None,
    key: jax.Array | None = None,
    amax: jax.Array | None = None,
    site: Site = Site.FPROP_X,
) -> Blocks:
    """Rotates, scales and rounds `x` in blocks along `axis`; see `quantize`."""
    _check(x, quantizer, key=key, amax=amax)
    axis, other = _checked_axes(x, quantizer, axis=axis, other=other)
    x, signs = _padded_and_rotated(
        lax.stop_gradient(x), quantizer, axis=axis, key=key, site=site
    )
    block_axes = (axis,) if other is None else (axis, other)
    tiling = blocks.Tiling(x.shape, dict.fromkeys(block_axes, quantizer.block_size))
    x = tiling.split(x.astype(jnp.float32))

    block_amax = blocks.amax(x, tiling.inside)
    factor = tensor_scale = None
    if quantizer.tensor_scale is not None:
        factor = scaling.tensor_factor(
            blocks.amax(block_amax) if amax is None else jnp.asarray(amax, jnp.float32),
            quantizer.tensor_scale,
            quantizer.grid,
        )
        tensor_scale = exact.divide(1.0, factor)
    scale, inverse = scaling.block_scale(
        block_amax,
        quantizer.scale,
        quantizer.grid,
        pad=quantizer.pads,
        factor=factor,
    )
    values = _rounded(
        x * inverse, quantizer, tiling=tiling, axis=axis, key=key, site=site
    )
    return Blocks(values, scale, tensor_scale, signs, tiling)


def _padded_and_rotated(
    x: jax.Array,
    quantizer: Quantizer,
    *,
    axis: int,
    key: jax.Array | None,
    site: Site,
) -> tuple[jax.Array, jax.Array | None]:
    """Pads the array to whole blocks, and rotates it if so asked; returns the signs."""
    rotation = quantizer.rotation
    run = 1 if rotation is None else rotation.size
    x = blocks.pad_to_multiple(x, {axis: math.lcm(quantizer.block_size, run)})
    if rotation is None:
        return x, None
    signs = hadamard.sign_vector(rotation, key, site.signs_stream)
    return hadamard.rotate(x, signs, axis), signs


def _rounded(
    t: jax.Array,
    quantizer: Quantizer,
    *,
    tiling: blocks.Tiling,
    axis: int,
    key: jax.Array | None,
    site: Site,
) -> jax.Array:
    """Rounds scaled elements to signed members of the grid, zero without a sign."""
    magnitude = jnp.abs(t)
    if quantizer.is_stochastic:
        assert key is not None
        words = random_bits.key_words(key, site.rounding_stream)
        row, column = blocks.positions(tiling, axis)
        bits = tiling.split(random_bits.uniform16(words, row, column))
        magnitude = rounding.round_stochastic(magnitude, bits, quantizer.grid)
    else:
        magnitude = rounding.round_nearest(magnitude, quantizer.grid)
    return jnp.where((t < 0) & (magnitude > 0), -magnitude, magnitude)


def _check(
    x: jax.Array,
    quantizer: Quantizer,
    *,
    key: jax.Array | None,
    amax: jax.Array | None,
) -> None:
    """Raises where an argument cannot be honoured."""
    checks.check_float(x, "quantize", name="x")
    if not isinstance(quantizer, Quantizer):
        raise TypeError(
            f"quantize: quantizer must be a Quantizer, got quantizer={quantizer!r}."
        )
    checks.check_key(key, "quantize")
    if quantizer.draws and key is None:
        raise ValueError(
            "quantize: key must be a PRNG key for a quantizer that draws random "
            f"numbers, got key=None (rounding={quantizer.rounding}, "
            f"rotation={quantizer.rotation})."
        )
    if amax is not None and quantizer.tensor_scale is None:
        raise ValueError(
            "quantize: amax must be None unless the quantizer has a tensor scale, got "
            f"amax={amax}."
        )
    if amax is not None and jnp.shape(amax) != ():
        raise ValueError(
            f"quantize: amax must be a scalar, got shape={jnp.shape(amax)}."
        )


def _checked_axes(
    x: jax.Array, quantizer: Quantizer, *, axis: int, other: int | None
) -> tuple[int, int | None]:
    """Returns the blocked axes, not negative; of a matrix, the other one by default."""
    axis = checks.checked_axis(x, axis, caller="quantize")
    if not quantizer.is_square:
        if other is not None:
            raise ValueError(
                "quantize: other must be None unless blocks are squares, got "
                f"other={other}, block={quantizer.block}."
            )
        return axis, None
    if other is None and x.ndim == 2:
        return axis, 1 - axis
    if other is None:
        raise ValueError(
            "quantize: other must name the second axis of square blocks, got "
            f"other=None (shape={x.shape}, block={quantizer.block})."
        )
    other = checks.checked_axis(x, other, caller="quantize", name="other")
    if other == axis:
        raise ValueError(
            f"quantize: other must differ from axis, got other={other}, axis={axis}."
        )
    return axis, other
