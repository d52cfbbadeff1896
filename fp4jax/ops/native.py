"""GEMMs on the FP4 tensor cores of a device, for `compute="native"`.

    y = sum over blocks of (codes_a codes_b) scale_a scale_b

Codes and block scales enter the hardware as they are, without a dequantized operand;
what a device without such tensor cores computes from `Blocks.operand` is the same up to
the order of sums. The path is lowered and its shapes are tested; no device that has the
tensor cores has run it yet.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

from fp4jax.kernels import devices
from fp4jax.numerics import E2M1, E4M3, E8M0, Quantizer
from fp4jax.numerics.blockwise import Blocks
from fp4jax.ops.dims import flatten

_CAPABILITY = 10  # of NVIDIA's first GPUs with FP4 tensor cores
# Block scales that the hardware multiplies by: their dtype and their block size.
_SCALES = {E4M3: (jnp.float8_e4m3fn, 16), E8M0: (jnp.float8_e8m0fnu, 32)}


def check_device() -> None:
    """Raises NotImplementedError unless the default device has FP4 tensor cores."""
    if (why := devices.too_small(_CAPABILITY)) is not None:
        raise NotImplementedError(
            f"dot_general: compute='native' cannot run: {why}. Use compute='bf16': the "
            "same values up to the order of sums."
        )


def check_quantizers(a: Quantizer, b: Quantizer) -> None:
    """Raises ValueError unless the hardware multiplies what two quantizers make."""
    for quantizer in (a, b):
        scale = quantizer.scale.format
        _, size = _SCALES.get(scale, (None, None))
        if quantizer.grid != E2M1 or quantizer.block_size != size:
            raise ValueError(
                "dot_general: compute='native' must have operands of grid E2M1 with "
                "scales E4M3 for 16 or E8M0 for 32 elements, got "
                f"grid={quantizer.grid}, scale={scale}, block={quantizer.block}. Use "
                "compute='bf16'."
            )
    if a.scale.format != b.scale.format:
        raise ValueError(
            "dot_general: compute='native' must have one scale format for both "
            f"operands of a GEMM, got {a.scale.format} and {b.scale.format}. Use "
            "compute='bf16'."
        )


def matmul(
    a: Blocks,
    b: Blocks,
    *,
    quantizers: tuple[Quantizer, Quantizer],
    batch: int = 0,
) -> jax.Array:
    """Multiplies two quantized arrays in FP4, float32 sums.

    Args:
      a: [*batch, ...].
      b: [*batch, ...], its contraction axis padded to the size of that of `a`.
      quantizers: what made `a` and `b`.
      batch: how many leading dimensions are batch dimensions.

    Returns:
      Float32 [*batch, *free of a, *free of b]; the tensor scales are left to multiply
      it, as with operands.

    Raises:
      ValueError: quantizers whose operands the hardware does not multiply.
    """
    check_quantizers(*quantizers)
    dtype, _ = _SCALES[quantizers[0].scale.format]
    y = _scaled_matmul(*_rows(a, batch, dtype), *_rows(b, batch, dtype))
    free = [
        [n for i, n in enumerate(x.tiling.shape) if i >= batch and i != x.axis]
        for x in (a, b)
    ]
    return y.reshape(*a.tiling.shape[:batch], *free[0], *free[1])


def _rows(
    x: Blocks, batch: int, dtype: jax.typing.DTypeLike
) -> tuple[jax.Array, jax.Array]:
    """Returns codes [batch, free, k] and scales [batch, free, k / block]."""
    tiling, axis = x.tiling, x.axis
    scales = lax.squeeze(x.scale, tiling.inside)
    for other, size in tiling.sizes.items():
        if other != axis:  # of squares, whose scale stands for several rows
            scales = jnp.repeat(scales, size, other)
            scales = lax.slice_in_dim(scales, 0, tiling.shape[other], axis=other)
    leading = math.prod(tiling.shape[:batch])

    def rows(a: jax.Array) -> jax.Array:
        k = a.shape[axis]
        free = math.prod(n for i, n in enumerate(a.shape) if i >= batch and i != axis)
        return jnp.moveaxis(a, axis, -1).reshape(leading, free, k)

    codes = tiling.join(x.values).astype(jnp.float4_e2m1fn)
    return rows(codes), rows(scales.astype(dtype))


@jax.custom_batching.custom_vmap
def _scaled_matmul(a, a_scales, b, b_scales) -> jax.Array:
    return jax.nn.scaled_matmul(a, b, a_scales, b_scales, jnp.float32)


@_scaled_matmul.def_vmap
def _scaled_matmul_vmap(size: int, in_batched: list[bool], *args: jax.Array):
    """The lanes join the batch dimension; the rule of JAX wants all to have them."""
    lanes = (
        a if batched else jnp.broadcast_to(a, (size, *a.shape))
        for a, batched in zip(args, in_batched, strict=True)
    )
    y = _scaled_matmul(*(flatten(a, 0, 2) for a in lanes))
    return y.reshape(size, -1, *y.shape[1:]), True
