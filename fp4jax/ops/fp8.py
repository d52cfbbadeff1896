"""GEMMs on the FP8 tensor cores of a device, for `compute="fp8"`.

    y = (a8 b8) 2^(ka + kb - 2 * 6),  a8 = code 2^(k - ka + 6) in E4M3

Here k is the exponent of a block's scale, and ka the largest of an index along the free
axis. A product of 4-bit codes and powers of two is exact in E4M3 as long as the scales
of such an index span no more than a window; where they do in one operand, the GEMM
multiplies bfloat16, in the same program.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from fp4jax.kernels.sums import float32_on_cpu
from fp4jax.numerics import E4M3, E8M0, Quantizer, blocks, exact, formats
from fp4jax.numerics.blockwise import Blocks
from fp4jax.numerics.packing import fits_half_a_byte
from fp4jax.ops.operands import Operand

LOWEST = -126  # below the exponent of every scale
_STEP = E4M3.emin - E4M3.mantissa_bits  # exponent of the smallest element


class Scaled(NamedTuple):
    """An operand for FP8 tensor cores.

    Attributes:
      array: float8_e4m3fn, of the operand's shape.
      exponent: int32 of the same shape but 1 along the contraction axis: what power of
        two multiplies each index of the free axes.
      fits: bool [], whether the array is exact.
    """

    array: jax.Array
    exponent: jax.Array
    fits: jax.Array


def takes(quantizer: Quantizer | None) -> bool:
    """Returns whether operands of a quantizer may be exact in E4M3."""
    if quantizer is None or quantizer.scale.format != E8M0:
        return False
    return fits_half_a_byte(quantizer.grid)


def window(grid: formats.Format) -> int:
    """Returns the binades that block scales may span: 14 on E2M1, 15 on UNIFORM."""
    return shift(grid) + grid.emin - grid.mantissa_bits - _STEP


def scaled(operand: Operand, quantizer: Quantizer) -> Scaled:
    """Returns a quantized operand as FP8 tensor cores take it."""
    split = operand.decoded()
    tiling, grid = split.tiling, quantizer.grid
    axis = split.axis + sum(other < split.axis for other in tiling.sizes)
    exponent = exact.exponent_of(split.scale)
    is_zero = jnp.all(split.values == 0, axis=tiling.inside, keepdims=True)
    highest = jnp.max(
        jnp.where(is_zero, LOWEST, exponent),
        axis=axis,
        keepdims=True,
        initial=LOWEST,
    )
    below = highest - exponent
    fits = jnp.all(is_zero | (below <= window(grid))) & jnp.all(
        jnp.isfinite(split.scale)
    )
    power = exact.pow2(shift(grid) - jnp.clip(below, 0, 2 * window(grid)))
    array = tiling.join((split.values * power).astype(jnp.float8_e4m3fn))
    exponent = _joined(highest, split) - shift(grid)
    shape = tuple(1 if i == operand.axis else n for i, n in enumerate(operand.shape))
    return Scaled(array.reshape(operand.shape), exponent.reshape(shape), fits)


def matmul(
    a: Operand,
    b: Operand,
    *,
    quantizers: tuple[Quantizer, Quantizer],
    batch: int,
    out_sharding: Any,
    otherwise: Callable[[], jax.Array],
) -> jax.Array:
    """Returns the float32 sums of products of two quantized operands.

    Args:
      a: [*batch, ..., contraction axis somewhere].
      b: likewise.
      quantizers: of a and b.
      batch: number of batch axes.
      out_sharding: of the result.
      otherwise: returns the same where an operand does not fit.
    """
    pair = [scaled(x, q) for x, q in zip((a, b), quantizers, strict=True)]
    k = max(a.shape[a.axis], b.shape[b.axis], 1)
    arrays = [
        blocks.pad_to_multiple(x.array, {operand.axis: k})
        for x, operand in zip(pair, (a, b), strict=True)
    ]
    batch_axes = tuple(range(batch))

    def multiply(a8: jax.Array, b8: jax.Array) -> jax.Array:
        return lax.dot_general(
            a8,
            b8,
            (((a.axis,), (b.axis,)), (batch_axes, batch_axes)),
            precision=lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
            out_sharding=out_sharding,
        )

    def in_fp8() -> jax.Array:
        y = float32_on_cpu(multiply, *arrays)
        of_a, of_b = (
            jnp.squeeze(x.exponent, operand.axis)
            for x, operand in zip(pair, (a, b), strict=True)
        )
        of_a = lax.expand_dims(of_a, range(of_a.ndim, y.ndim))
        of_b = lax.expand_dims(of_b, range(batch, batch + y.ndim - of_b.ndim))
        return _times_pow2(y, _spread_as(y, of_a) + _spread_as(y, of_b))

    return lax.cond(pair[0].fits & pair[1].fits, in_fp8, otherwise)


def contract(a: Scaled, b: Scaled, dtype: Any) -> jax.Array:
    """Returns a b^T of matrices [m, k] and [n, k] that fit.

    Sums are rounded to the result's type before they are multiplied by a power of two,
    which changes nothing but what that type has no exponent for.

    Args:
      a: of exponents [m, 1].
      b: of exponents [n, 1].
      dtype: of the result.
    """
    y = multiply(a, b, dtype)
    exponent = a.exponent + jnp.transpose(b.exponent)
    return _times_pow2(y.astype(jnp.float32), exponent).astype(dtype)


def cancel(a: Scaled, b: Scaled) -> jax.Array:
    """Returns whether `contract` is `multiply`: bool []."""
    of_a, of_b = a.exponent[0, 0], b.exponent[0, 0]
    equal = jnp.all(a.exponent == of_a) & jnp.all(b.exponent == of_b)
    return equal & (of_a + of_b == 0)


def multiply(a: Scaled, b: Scaled, dtype: Any) -> jax.Array:
    """Returns a b^T of the arrays of matrices [m, k] and [n, k]."""

    def product(a8: jax.Array, b8: jax.Array) -> jax.Array:
        return lax.dot_general(
            a8,
            b8,
            (((1,), (1,)), ((), ())),
            precision=lax.Precision.HIGHEST,
            preferred_element_type=dtype,
        )

    return float32_on_cpu(product, a.array, b.array)


def shift(grid: formats.Format) -> int:
    """Returns the exponent to which the largest scale is brought, so that codes fit."""
    return math.floor(math.log2(E4M3.max / grid.max))


def _joined(highest: jax.Array, split: Blocks) -> jax.Array:
    """Returns the exponents of indices along the free axes, 1 along the contraction."""
    tiling = split.tiling
    exponents = lax.squeeze(highest, tiling.inside)
    for axis, size in tiling.sizes.items():
        if axis != split.axis:
            of_elements = jnp.expand_dims(exponents, axis + 1)
            shape = [
                size if i == axis + 1 else n for i, n in enumerate(of_elements.shape)
            ]
            exponents = blocks.join_axes(jnp.broadcast_to(of_elements, shape), axis)
            exponents = lax.slice_in_dim(exponents, 0, tiling.shape[axis], axis=axis)
    return exponents


def _spread_as(y: jax.Array, x: jax.Array) -> jax.Array:
    """Returns x, of size 1 along other axes, on explicit mesh axes as y lies there."""
    sharding = jax.typeof(y).sharding
    if AxisType.Explicit not in sharding.mesh.axis_types:
        return x
    axes = zip(x.shape, sharding.spec, strict=False)
    spec = P(*(None if size == 1 else names for size, names in axes))
    return jax.sharding.reshard(x, NamedSharding(sharding.mesh, spec))


def _times_pow2(y: jax.Array, exponent: jax.Array) -> jax.Array:
    """Multiplies by powers of two that one float32 may not hold."""
    half = exponent >> 1
    for part in (half, exponent - half):
        y = y * exact.pow2(jnp.clip(part, -126, 127))
    return y
