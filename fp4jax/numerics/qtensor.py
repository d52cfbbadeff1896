"""Quantized tensors, and the functions that make and read them."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from fp4jax.numerics import formats
from fp4jax.numerics.blocks import Tiling
from fp4jax.numerics.blockwise import Blocks, quantize_blocks
from fp4jax.numerics.quantizer import Quantizer
from fp4jax.numerics.sites import Site


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QTensor:
    """A quantized array: codes, block scales, tensor scale, and its quantizer.

    x ~ H'^T(decode(codes) scales) tensor_scale

    Attributes:
      codes: uint8, one sign-magnitude code an element, in the axis order of the array;
        the contraction axis is padded to whole blocks and rotation runs.
      scales: float32 block scales, exact members of their format; the blocked axes hold
        one entry a block.
      tensor_scale: float32 scalar 1 / s_enc, or None.
      signs: float32 signs of the rotation, or None.
      quantizer: what made it.
      axis: the contraction axis.
      other: the second blocked axis of square blocks, or None.
      shape: of the array.
      dtype: of the array.
    """

    codes: jax.Array
    scales: jax.Array
    tensor_scale: jax.Array | None
    signs: jax.Array | None
    quantizer: Quantizer = dataclasses.field(metadata={"static": True})
    axis: int = dataclasses.field(metadata={"static": True})
    other: int | None = dataclasses.field(metadata={"static": True})
    shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    dtype: jnp.dtype = dataclasses.field(metadata={"static": True})


def quantize(
    x: jax.Array,
    quantizer: Quantizer,
    *,
    axis: int = -1,
    other: int | None = None,
    key: jax.Array | None = None,
    amax: jax.Array | None = None,
    site: Site = Site.FPROP_X,
) -> QTensor:
    """Rounds an array to the quantizer's grid, one scale for each block.

    codes = round(H(x) inv),  inv = 1 / scale,  scale = cast(amax_block / g_max)

    The bits are the same for every device, mesh and tracing, with one exception: under
    a rotation of size n, where the nonzero magnitudes of a run of bfloat16 `x` span
    more than 2^16 / n, float32 sums depend on their order. A block with a NaN or an
    infinity becomes NaN as a whole; with a tensor scale, the tensor does. Gradients do
    not flow; see `fake_quant`.

    Args:
      x: [*b, k] for the default `axis`, float32, bfloat16 or float16; k is zero-padded
        to whole blocks and rotation runs.
      quantizer: grid, block, scale, rounding and rotation.
      axis: the contraction axis, along which blocks run.
      other: the second axis of square blocks; may be left out for a matrix.
      key: Threefry key of stochastic rounding and of signs drawn for each step, typed
        or raw uint32[2]. Under `jax.vmap` an unbatched key gives every lane the same
        noise.
      amax: float32 [] that stands in for the amax of the (rotated) tensor.
      site: which stream of the key to draw from.

    Returns:
      QTensor: codes [*b, k padded], scales [*b, ceil(k / block)] for rows, and with a
      two-level scale the tensor scale [].

    Raises:
      ValueError: a quantizer that draws without a key; several keys; an axis out of
        range or missing; `other` or `amax` where they mean nothing.
      TypeError: an array that is not of a supported float type; a key that is none, or
        of another implementation than Threefry.

    Example:
      >>> import jax.numpy as jnp
      >>> from fp4jax.numerics import E2M1, Quantizer
      >>> q = quantize(jnp.array([0.3, 1.0, -2.4, 6.0]), Quantizer(E2M1, block=4))
      >>> q.codes.tolist(), q.scales.tolist()
      ([1, 2, 12, 7], [1.0])
      >>> dequantize(q).tolist()
      [0.5, 1.0, -2.0, 6.0]
    """
    x = jnp.asarray(x)
    parts = quantize_blocks(
        x, quantizer, axis=axis, other=other, key=key, amax=amax, site=site
    )
    axis %= x.ndim
    return QTensor(
        codes=parts.tiling.join(formats.encode(parts.values, quantizer.grid)),
        scales=lax.squeeze(parts.scale, parts.tiling.inside),
        tensor_scale=parts.tensor_scale,
        signs=parts.signs,
        quantizer=quantizer,
        axis=axis,
        other=next((i for i in parts.tiling.sizes if i != axis), None),
        shape=x.shape,
        dtype=x.dtype,
    )


def operand(q: QTensor, dtype: jax.typing.DTypeLike = jnp.bfloat16) -> jax.Array:
    """Returns the input of the GEMM: rotated and padded along the contraction axis.

    operand = decode(codes) scales

    In bfloat16 this is exact for 4-bit codes under every block scale but `F32`, whose
    product is rounded to nearest. The tensor scale is left to multiply the result of
    the GEMM.

    Args:
      q: a quantized tensor.
      dtype: bfloat16 or float32.

    Returns:
      Array of `dtype`, of the shape of `q.codes`.

    Raises:
      TypeError: another dtype; what is no `QTensor`.

    Example:
      >>> import jax.numpy as jnp
      >>> from fp4jax.numerics import E2M1, Quantizer
      >>> q = quantize(jnp.array([0.3, 1.0, -2.4]), Quantizer(E2M1, block=4))
      >>> operand(q).shape, operand(q).dtype  # padded
      ((4,), dtype(bfloat16))
    """
    _check(q, "operand")
    if dtype not in (jnp.bfloat16, jnp.float32):
        raise TypeError(
            f"operand: dtype must be bfloat16 or float32, got dtype={jnp.dtype(dtype)}."
        )
    return _blocks(q).operand(dtype)


def dequantize(q: QTensor) -> jax.Array:
    """Decodes a quantized tensor to values comparable with the array it was made of.

    x_dq = H'^T(decode(codes) scales) tensor_scale

    Bits are the same for every tracing, but for a rotation under `F32` scales, whose
    sums may differ in the last place.

    Args:
      q: a quantized tensor.

    Returns:
      Array of the original shape and dtype, the rotation and the padding undone.

    Raises:
      TypeError: what is no `QTensor`.

    Example:
      >>> import jax.numpy as jnp
      >>> from fp4jax.numerics import UNIFORM, Quantizer
      >>> q = quantize(jnp.array([-7.0, 0.4, 2.6]), Quantizer(UNIFORM, block=4))
      >>> dequantize(q).tolist()
      [-7.0, 0.0, 3.0]
    """
    _check(q, "dequantize")
    x = _blocks(q).dequantized()
    return x[tuple(slice(n) for n in q.shape)].astype(q.dtype)


def fake_quant(
    x: jax.Array,
    quantizer: Quantizer,
    *,
    axis: int = -1,
    other: int | None = None,
    key: jax.Array | None = None,
    amax: jax.Array | None = None,
    site: Site = Site.FPROP_X,
) -> jax.Array:
    """Quantizes and dequantizes; the gradient passes straight through.

    x_dq = dequantize(quantize(x)),  d x_dq / d x = 1

    Args:
      x: float32, bfloat16 or float16 array.
      quantizer: grid, block, scale, rounding and rotation.
      axis: the contraction axis, along which blocks run.
      other: the second axis of square blocks; may be left out for a matrix.
      key: Threefry key, typed or raw uint32[2], for quantizers that draw.
      amax: float32 [] that stands in for the amax of the (rotated) tensor.
      site: which stream of the key to draw from.

    Returns:
      Array of the shape and dtype of `x`.

    Raises:
      ValueError: as `quantize`: a missing key, several keys, or axes or an `amax` that
        cannot be honored.
      TypeError: as `quantize`: the type of `x` or of `key`.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from fp4jax.numerics import E2M1, Quantizer
      >>> f = lambda x: fake_quant(x, Quantizer(E2M1, block=4))
      >>> x = jnp.array([0.3, 1.0, -2.4, 6.0])
      >>> f(x).tolist(), jax.grad(lambda x: f(x).sum())(x).tolist()
      ([0.5, 1.0, -2.0, 6.0], [1.0, 1.0, 1.0, 1.0])
    """
    x = jnp.asarray(x)
    q = quantize(x, quantizer, axis=axis, other=other, key=key, amax=amax, site=site)
    return _straight_through(x, dequantize(q))


@jax.custom_jvp
def _straight_through(x: jax.Array, x_dq: jax.Array) -> jax.Array:
    return x_dq


@_straight_through.defjvp
def _straight_through_jvp(primals, tangents):
    return _straight_through(*primals), tangents[0]


def tiling_of(q: QTensor) -> Tiling:
    """Returns how the codes of a quantized tensor are split into blocks."""
    axes = (q.axis,) if q.other is None else (q.axis, q.other)
    return Tiling(q.codes.shape, dict.fromkeys(axes, q.quantizer.block_size))


def _check(q: QTensor, caller: str) -> None:
    if not isinstance(q, QTensor):
        raise TypeError(
            f"{caller}: q must be what fp4jax.quantize returns, got {type(q).__name__}."
        )


def _blocks(q: QTensor) -> Blocks:
    tiling = tiling_of(q)
    return Blocks(
        values=tiling.split(formats.decode(q.codes, q.quantizer.grid)),
        scale=lax.expand_dims(q.scales, tiling.inside),
        tensor_scale=q.tensor_scale,
        signs=q.signs,
        tiling=tiling,
        axis=q.axis,
    )
