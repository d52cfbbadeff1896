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
    axis, other = _check(x, quantizer, axis, other, key, amax)
    x = lax.stop_gradient(x)
    x, signs = _padded_and_rotated(x, quantizer, axis, key, site)
    x = x.astype(jnp.float32)

    factor = None
    if quantizer.tensor_scale is not None:
        factor = scaling.tensor_factor(
            blocks.amax(x) if amax is None else amax.astype(jnp.float32),
            quantizer.tensor_scale,
            quantizer.grid,
        )
    block_axes = (axis,) if other is None else (axis, other)
    tiling = blocks.Tiling(x.shape, dict.fromkeys(block_axes, quantizer.block_size))
    x = tiling.split(x)
    scale, inverse = scaling.block_scale(
        blocks.amax(x, tiling.inside),
        quantizer.scale,
        quantizer.grid,
        pad=quantizer.pads,
        factor=factor,
    )
    t = x * inverse
    if quantizer.is_stochastic:
        words = random_bits.key_words(key, site.rounding_stream)
        row, column = blocks.positions(tiling, axis)
        bits = random_bits.uniform16(words, row, column).reshape(t.shape)
        magnitude = rounding.round_stochastic(jnp.abs(t), bits, quantizer.grid)
    else:
        magnitude = rounding.round_nearest(jnp.abs(t), quantizer.grid)
    values = jnp.where((t < 0) & (magnitude > 0), -magnitude, magnitude)
    tensor_scale = None if factor is None else exact.divide(1.0, factor)
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


def _check(
    x: jax.Array,
    quantizer: Quantizer,
    axis: int,
    other: int | None,
    key: jax.Array | None,
    amax: jax.Array | None,
) -> tuple[int, int | None]:
    """The two axes, not negative; raises where an argument cannot be honoured."""
    if x.dtype not in _FLOATS:
        raise TypeError(
            "quantize: x must be float32, bfloat16 or float16, got "
            f"dtype={x.dtype} (shape={x.shape})."
        )
    axis = _axis(x, axis, "axis")
    if quantizer.is_square:
        if other is None and x.ndim == 2:
            other = 1 - axis
        if other is None:
            raise ValueError(
                "quantize: other must name the second axis of square blocks, got "
                f"other=None (shape={x.shape}, block={quantizer.block})."
            )
        other = _axis(x, other, "other")
        if other == axis:
            raise ValueError(
                f"quantize: other must differ from axis, got other={other}, "
                f"axis={axis}."
            )
    elif other is not None:
        raise ValueError(
            "quantize: other must be None unless blocks are squares, got "
            f"other={other}, block={quantizer.block}."
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
            "an amax."
        )
    return axis, other


def _axis(x: jax.Array, axis: int, name: str) -> int:
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(
            f"quantize: {name} must lie in [{-x.ndim}, {x.ndim}), got {name}={axis} "
            f"(shape={x.shape})."
        )
    return axis % x.ndim
