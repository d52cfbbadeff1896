"""Quantization of an array in blocks: the one algorithm behind every recipe."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax

from fp4jax.numerics import blocks, exact, hadamard, random_bits, rounding, scaling
from fp4jax.numerics.quantizer import Quantizer
from fp4jax.numerics.sites import Site

_FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)


@dataclasses.dataclass(frozen=True)
class Blocks:
    """A quantized array, split into blocks.

    Attributes:
      values: Float32 members of the grid, axes split by `tiling`.
      scale: Float32 members of the scale's format, 1 on the axes inside a block.
      tensor_scale: Float32 scalar that multiplies every scale, or None.
      signs: Float32 signs of the rotation, or None.
      tiling: How the axes were split.
    """

    values: jax.Array
    scale: jax.Array
    tensor_scale: jax.Array | None
    signs: jax.Array | None
    tiling: blocks.Tiling

    def operand(self, dtype: jax.typing.DTypeLike) -> jax.Array:
        """values scale, joined: what the GEMM multiplies, without the tensor scale."""
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
    _check(x, quantizer, key, amax)
    axis, other = _checked_axes(x, quantizer, axis, other)
    x, signs = _padded_and_rotated(lax.stop_gradient(x), quantizer, axis, key, site)
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
    values = _rounded(x * inverse, quantizer, tiling, axis, key, site)
    return Blocks(values, scale, tensor_scale, signs, tiling)


def _padded_and_rotated(
    x: jax.Array, quantizer: Quantizer, axis: int, key: jax.Array | None, site: Site
) -> tuple[jax.Array, jax.Array | None]:
    """The array in whole blocks along `axis`, rotated if so asked; and the signs."""
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
    tiling: blocks.Tiling,
    axis: int,
    key: jax.Array | None,
    site: Site,
) -> jax.Array:
    """Signed members of the grid for scaled elements, zero without a sign."""
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
    key: jax.Array | None,
    amax: jax.Array | None,
) -> None:
    """Raises where an argument cannot be honoured."""
    if x.dtype not in _FLOATS:
        raise TypeError(
            "quantize: x must be float32, bfloat16 or float16, got "
            f"dtype={x.dtype} (shape={x.shape})."
        )
    if not isinstance(quantizer, Quantizer):
        raise TypeError(
            f"quantize: quantizer must be a Quantizer, got quantizer={quantizer!r}."
        )
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
    x: jax.Array, quantizer: Quantizer, axis: int, other: int | None
) -> tuple[int, int | None]:
    """The blocked axes, not negative; of a matrix, the other one by default."""
    axis = blocks.checked_axis(x, axis, "quantize")
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
    other = blocks.checked_axis(x, other, "quantize", "other")
    if other == axis:
        raise ValueError(
            f"quantize: other must differ from axis, got other={other}, axis={axis}."
        )
    return axis, other
