"""Statistics of one array quantized twice: transposed, or with other random bits."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fp4jax.numerics.qtensor import QTensor, dequantize, quantize
from fp4jax.numerics.quantizer import Quantizer
from fp4jax.numerics.stats.error import norm_ratio, ratio, shrinkage


class TransposeMismatch(NamedTuple):
    """How much two views of a matrix differ, each a float32 scalar.

    Attributes:
      scale: share of elements whose scale differs.
      scale_log2: mean over elements of |log2 (scale / scale of the other view)|.
      value: share of elements whose dequantized value differs.
      error: norm of the difference of values in units of the matrix's.
    """

    scale: jax.Array
    scale_log2: jax.Array
    value: jax.Array
    error: jax.Array


class StochasticBias(NamedTuple):
    """What stochastic rounding gets wrong on average.

    Attributes:
      error: mean over keys of Q(x), minus x; float32 of the shape of x. Of n keys,
        unbiased rounding leaves noise of 1 / sqrt(n) of that of one.
      misalignment: mean over keys of 1/S - 1 = <Q(x), x> / ||x||^2 - 1; float32 scalar.
    """

    error: jax.Array
    misalignment: jax.Array


def transpose_mismatch(
    w: jax.Array,
    quantizer: Quantizer,
    *,
    key: jax.Array | None = None,
    amax: jax.Array | None = None,
) -> TransposeMismatch:
    """Returns how much quantizing a matrix and its transpose differ.

    E[S != S_T],  E[|log2 S / S_T|],  E[Q(W) != Q(W^T)^T],  ||Q(W) - Q(W^T)^T|| / ||W||

    A weight is contracted over one axis in fprop and over the other in dgrad; square
    blocks under nearest rounding give both the same values.

    Args:
      w: [m, n] float32, bfloat16 or float16 matrix.
      quantizer: of both views.
      key: Threefry key, for quantizers that draw.
      amax: as of `quantize`, where `w` is a part of a tensor.

    Returns:
      The four. Elements whose scale is 0 in either view are left out of `scale_log2`.

    Raises:
      ValueError: an array that is no matrix; as `quantize`.
      TypeError: as `quantize`.
    References: arXiv 2607.24953.

    Example:
      >>> import jax.numpy as jnp
      >>> from fp4jax.numerics import UNIFORM, Quantizer
      >>> w = jnp.array([[7.0, 1.0], [7.0, 14.0]])
      >>> rows = transpose_mismatch(w, Quantizer(UNIFORM, block=2))
      >>> rows.scale.item(), rows.scale_log2.item(), rows.value.item()
      (0.5, 0.5, 0.5)
      >>> transpose_mismatch(w, Quantizer(UNIFORM, block=(2, 2))).value.item()
      0.0
    """
    w = jnp.asarray(w)
    if w.ndim != 2:
        raise ValueError(
            f"transpose_mismatch: w must be a matrix, got shape={w.shape}."
        )
    rows, columns = (
        quantize(w, quantizer, axis=axis, key=key, amax=amax) for axis in (1, 0)
    )
    s, s_t = (_element_scales(q) for q in (rows, columns))
    value, value_t = (dequantize(q).astype(jnp.float32) for q in (rows, columns))
    defined = (s != 0) & (s_t != 0)
    log2, log2_t = (jnp.log2(jnp.where(defined, scale, 1)) for scale in (s, s_t))
    octaves, count = (
        jnp.sum(jnp.abs(log2 - log2_t)),
        jnp.sum(defined, dtype=jnp.float32),
    )
    return TransposeMismatch(
        scale=_share_that_differs(s, s_t),
        scale_log2=ratio(octaves, count, empty=0),
        value=_share_that_differs(value, value_t),
        error=norm_ratio(value - value_t, w),
    )


def stochastic_bias(
    x: jax.Array, quantizer: Quantizer, *, keys: jax.Array, axis: int = -1
) -> StochasticBias:
    """Returns the error that rounding leaves on average over keys.

    error = E[Q(x)] - x,  misalignment = E[1/S] - 1,  1/S = <Q(x), x> / ||x||^2

    Args:
      x: float32, bfloat16 or float16 array.
      quantizer: one that draws; any other has the same error under every key.
      keys: Threefry keys, [n] typed or [n, 2] raw.
      axis: the contraction axis.

    Returns:
      The mean error of each element, and the misalignment.

    Raises:
      ValueError: as `quantize`.
      TypeError: as `quantize`.
    References: Quartet, arXiv 2505.14669, section 4.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from fp4jax.numerics import UNIFORM, Quantizer, Stochastic
      >>> q = Quantizer(UNIFORM, block=4, rounding=Stochastic())
      >>> x = jnp.array([7.0, 0.5, 2.0, -1.0])
      >>> found = stochastic_bias(x, q, keys=jax.random.split(jax.random.key(0), 64))
      >>> bool(abs(found.error[1]) < 0.2), found.error[2].item()
      (True, 0.0)
    """
    x = jnp.asarray(x)
    reference = x.astype(jnp.float32)

    def add(total: jax.Array, key: jax.Array):
        x_dq = dequantize(quantize(x, quantizer, axis=axis, key=key))
        x_dq = x_dq.astype(jnp.float32)
        return total + (x_dq - reference), shrinkage(reference, x_dq)

    total, alpha = lax.scan(add, jnp.zeros_like(reference), keys)
    return StochasticBias(total / keys.shape[0], jnp.mean(alpha) - 1)


def _element_scales(q: QTensor) -> jax.Array:
    """Returns the scale of every element of the array, tensor scale included."""
    scales = q.scales if q.tensor_scale is None else q.scales * q.tensor_scale
    for axis in {q.axis, q.other} - {None}:
        scales = jnp.repeat(scales, q.quantizer.block_size, axis)
    return scales[tuple(slice(n) for n in q.shape)]


def _share_that_differs(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns the share of elements in which two arrays differ; NaN if any is."""
    is_nan = jnp.isnan(a) | jnp.isnan(b)
    return jnp.mean(jnp.where(is_nan, jnp.nan, (a != b).astype(jnp.float32)))
