"""Statistics of an array x beside a rounded copy x_dq, of the same shape.

The sums are those of both arrays divided by a power of two near their largest
magnitude, so that no square over- or underflows.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fp4jax.numerics import blocks, exact


class Cumulative(NamedTuple):
    """Shrinkage over depth, each float32 [layers].

    Attributes:
      product: eta_1 eta_2 ... eta_k.
      log_sum: log eta_1 + log eta_2 + ... + log eta_k.
    """

    product: jax.Array
    log_sum: jax.Array


def nmse(x: jax.Array, x_dq: jax.Array) -> jax.Array:
    """Returns the error's energy in units of the array's.

    NMSE = ||x_dq - x||^2 / ||x||^2

    Args:
      x: array of any float dtype.
      x_dq: its rounded copy, or any estimate of it, of the same shape.

    Returns:
      Float32 scalar; 0 if both are zero, infinite if only `x` is.

    Raises:
      ValueError: shapes that differ.

    Example:
      >>> import jax.numpy as jnp
      >>> nmse(jnp.array([3.0, 4.0]), jnp.array([3.0, 3.0])).item()
      0.03999999910593033
    """
    return _nmse(x, x_dq, caller="nmse")


def qsnr(x: jax.Array, x_dq: jax.Array) -> jax.Array:
    """Returns the quantization signal-to-noise ratio in decibels.

    QSNR = -10 log10(||x_dq - x||^2 / ||x||^2)

    Args:
      x: array of any float dtype.
      x_dq: its rounded copy, of the same shape.

    Returns:
      Float32 scalar; infinite without error, minus infinity if only `x` is zero.

    Raises:
      ValueError: shapes that differ.
    References: INT v.s. FP, arXiv 2510.25602; UFP4, arXiv 2606.20381, section 5.2.

    Example:
      >>> import jax.numpy as jnp
      >>> round(qsnr(jnp.array([3.0, 4.0]), jnp.array([3.0, 3.0])).item(), 3)
      13.979
    """
    return -10 * jnp.log10(_nmse(x, x_dq, caller="qsnr"))


def cosine(x: jax.Array, x_dq: jax.Array) -> jax.Array:
    """Returns the cosine of the angle between an array and its rounded copy.

    cos = <x, x_dq> / (||x|| ||x_dq||)

    Args:
      x: array of any float dtype.
      x_dq: its rounded copy, of the same shape.

    Returns:
      Float32 scalar; 1 if both are zero, 0 if one is.

    Raises:
      ValueError: shapes that differ.

    Example:
      >>> import jax.numpy as jnp
      >>> cosine(jnp.array([3.0, 4.0]), jnp.array([6.0, 8.0])).item()
      1.0
    """
    x, x_dq = _normalized(x, x_dq, caller="cosine")
    norm, norm_dq = jnp.sqrt(_dot(x, x)), jnp.sqrt(_dot(x_dq, x_dq))
    parallel = ratio(_dot(x, x_dq), norm * norm_dq, empty=0)
    return jnp.where((norm == 0) & (norm_dq == 0), jnp.float32(1), parallel)


def shrinkage(x: jax.Array, x_dq: jax.Array) -> jax.Array:
    """Returns alpha, by which rounding scales the part of an array along itself.

    x_dq = alpha x + r,  <r, x> = 0,  alpha = <x_dq, x> / ||x||^2

    Below 1 rounding shrinks, above 1 it expands. Of the outputs of a GEMM, exact and
    from quantized operands, the same quotient is its eta.

    Args:
      x: array of any float dtype.
      x_dq: its rounded copy, of the same shape.

    Returns:
      Float32 scalar; 1 if both are zero, and if only `x` is.

    Raises:
      ValueError: shapes that differ.
    References: UFP4, arXiv 2606.20381, Eq. 3.

    Example:
      >>> import jax.numpy as jnp
      >>> shrinkage(jnp.array([3.0, 4.0]), jnp.array([1.5, 2.0])).item()
      0.5
    """
    x, x_dq = _normalized(x, x_dq, caller="shrinkage")
    # Around 1: the sum of small differences keeps digits that a quotient near 1 loses.
    return 1 + ratio(_dot(x_dq - x, x), _dot(x, x), empty=0)


def gemm_shrinkage(
    x: jax.Array, w: jax.Array, x_dq: jax.Array, w_dq: jax.Array
) -> jax.Array:
    """Returns eta, by which quantized operands scale a GEMM's output along itself.

    eta = <x_dq w_dq, x w> / ||x w||^2,  about alpha(x) alpha(w)

    Args:
      x: [m, k] first operand, as an array whose rows the GEMM contracts.
      w: [k, n] second operand.
      x_dq: [m, k] rounded copy of `x`.
      w_dq: [k, n] rounded copy of `w`.

    Returns:
      Float32 scalar; 1 if the exact product is zero.

    Raises:
      ValueError: shapes that differ.
    References: UFP4, arXiv 2606.20381, Eq. 4.

    Example:
      >>> import jax.numpy as jnp
      >>> x, w = jnp.eye(2), jnp.ones((2, 3))
      >>> gemm_shrinkage(x, w, 0.5 * x, 0.5 * w).item()
      0.25
    """
    x, x_dq = _normalized(x, x_dq, caller="gemm_shrinkage")
    w, w_dq = _normalized(w, w_dq, caller="gemm_shrinkage", name="w")
    product, product_dq = (
        jnp.matmul(a, b, precision=lax.Precision.HIGHEST)
        for a, b in ((x, w), (x_dq, w_dq))
    )
    return shrinkage(product, product_dq)


def cumulative_shrinkage(eta: jax.Array) -> Cumulative:
    """Returns the shrinkage of a signal that passes through consecutive GEMMs.

    product_k = prod_{j <= k} eta_j = exp(log_sum_k)
              ~ exp(-sum_{j <= k} (1 - eta_j))

    An upper bound on the damage: norms and residual branches rescale the signal.

    Args:
      eta: [layers] positive, of each GEMM from the first on.

    Returns:
      The product and the sum of logarithms, up to and with each layer.

    Raises:
      ValueError: an `eta` that is not a vector.
    References: UFP4, arXiv 2606.20381, Eq. 5.

    Example:
      >>> import jax.numpy as jnp
      >>> cumulative_shrinkage(jnp.array([0.5, 0.5, 1.0])).product.tolist()
      [0.5, 0.25, 0.25]
    """
    eta = jnp.asarray(eta, jnp.float32)
    if eta.ndim != 1:
        raise ValueError(
            f"cumulative_shrinkage: eta must be a vector, got shape={eta.shape}."
        )
    return Cumulative(jnp.cumprod(eta), jnp.cumsum(jnp.log(eta)))


def ratio(a: jax.Array, b: jax.Array, *, empty: float) -> jax.Array:
    """Returns a / b, and `empty` where both are zero."""
    undefined = (a == 0) & (b == 0)
    return jnp.where(undefined, empty, a) / jnp.where(undefined, 1, b)


def norm_ratio(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns ||a|| / ||b|| of two arrays of one shape, 0 if both are zero."""
    a, b = _normalized(a, b, caller="norm_ratio")
    return jnp.sqrt(ratio(_dot(a, a), _dot(b, b), empty=0))


def _nmse(x: jax.Array, x_dq: jax.Array, *, caller: str) -> jax.Array:
    x, x_dq = _normalized(x, x_dq, caller=caller)
    return ratio(_dot(x_dq - x, x_dq - x), _dot(x, x), empty=0)


def _normalized(
    x: jax.Array, x_dq: jax.Array, *, caller: str, name: str = "x"
) -> tuple[jax.Array, jax.Array]:
    """Returns both arrays in float32, divided by one power of two near their amax."""
    x, x_dq = jnp.asarray(x), jnp.asarray(x_dq)
    if x.shape != x_dq.shape:
        raise ValueError(
            f"{caller}: {name} and {name}_dq must have the same shape, got shapes "
            f"{x.shape} and {x_dq.shape}."
        )
    x, x_dq = x.astype(jnp.float32), x_dq.astype(jnp.float32)
    power = exact.floor_pow2(jnp.maximum(blocks.amax(x), blocks.amax(x_dq)))
    unit = exact.inverse_pow2(jnp.minimum(power, jnp.float32(2.0**126)))
    return x * unit, x_dq * unit


def _dot(a: jax.Array, b: jax.Array) -> jax.Array:
    return jnp.sum(a * b)
