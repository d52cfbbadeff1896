"""Statistics of a quantized tensor, some beside the array that it was made of.

Magnitudes are counted in grid units, t = |H(x)| / scale, where H is the rotation of
the quantizer, or none, and the scale that of the element's block times the tensor's.
rho(t) is the member of the grid that stands in the codes. Zeros that only fill blocks
up are not counted. Elements of a block of scale 0 have t = 0.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp4jax.numerics import formats
from fp4jax.numerics.qtensor import QTensor, tiling_of
from fp4jax.numerics.stats.error import ratio
from fp4jax.numerics.stats.split import filled, magnitudes

# A float32 product misses g_max by less than this; whatever goes beyond, saturates.
_SLACK = 1 + 2.0**-16


def occupancy(q: QTensor) -> jax.Array:
    """Returns the share of elements in each bin of the grid, by magnitude code.

    p_i = fraction of elements with rho(t) = q_i

    Args:
      q: a quantized tensor.

    Returns:
      Float32 [K] for a grid of K magnitudes, ascending; all NaN where a scale is.

    Example:
      >>> import jax.numpy as jnp
      >>> from fp4jax.numerics import INT2, Quantizer, quantize
      >>> q = quantize(jnp.array([4.0, 0.1, -4.0, 1.0]), Quantizer(INT2, block=4))
      >>> occupancy(q).tolist()
      [0.5, 0.5]
    """
    weight = _weight(q)
    return _by_code(q, lambda hit: _mean(hit, weight))


def grid_use(q: QTensor) -> jax.Array:
    """Returns which part of the grid the elements use, B_eff.

    B_eff = exp(-sum_i p_i log p_i) / K

    Args:
      q: a quantized tensor.

    Returns:
      Float32 scalar: 1 if all K magnitudes are equally frequent, 1/K if one has all.

    References: UFP4, arXiv 2606.20381, Eq. 6.

    Example:
      >>> import jax.numpy as jnp
      >>> from fp4jax.numerics import INT2, Quantizer, quantize
      >>> q = quantize(jnp.array([4.0, 0.1, -4.0, 1.0]), Quantizer(INT2, block=4))
      >>> grid_use(q).item()
      1.0
    """
    p = occupancy(q)
    entropy = -jnp.sum(p * jnp.log(jnp.where(p == 0, 1, p)))
    return jnp.exp(entropy) / p.size


def zero_rate(q: QTensor) -> jax.Array:
    """Returns the share of elements that were rounded to zero.

    Args:
      q: a quantized tensor.

    Returns:
      Float32 scalar; NaN where a scale is.
    """
    return _mean(_magnitude_codes(q) == 0, _weight(q))


def top_rate(q: QTensor) -> jax.Array:
    """Returns the share of elements at the grid's largest magnitude.

    Args:
      q: a quantized tensor.

    Returns:
      Float32 scalar; NaN where a scale is.
    """
    top = len(q.quantizer.grid.magnitudes) - 1
    return _mean(_magnitude_codes(q) == top, _weight(q))


def nonfinite_rate(q: QTensor) -> jax.Array:
    """Returns the share of elements in blocks that NaN or infinity spoiled.

    Args:
      q: a quantized tensor.

    Returns:
      Float32 scalar; 1 for a whole tensor under a tensor scale.
    """
    return _mean(jnp.isnan(_block_scale(q)) & (filled(q) > 0), filled(q))


def bias(x: jax.Array, q: QTensor) -> jax.Array:
    """Returns the signed relative bias of magnitudes in grid units.

    b = E[rho(t) - t] / E[t]

    Each element counts alike here; in `shrinkage` the large ones count most.

    Args:
      x: what `q` was quantized from.
      q: a quantized tensor.

    Returns:
      Float32 scalar; 0 of zeros.

    Raises:
      ValueError: an array that `q` was not made of.

    Example:
      >>> import jax.numpy as jnp
      >>> from fp4jax.numerics import UNIFORM, Quantizer, quantize
      >>> x = jnp.array([7.0, 0.4, -2.6, 0.0])
      >>> round(bias(x, quantize(x, Quantizer(UNIFORM, block=4))).item(), 4)
      0.0
    """
    t, weight = _scaled(x, q, caller="bias"), _weight(q)
    return ratio(_mean(_rounded(q) - t, weight), _mean(t, weight), empty=0)


def bin_error(x: jax.Array, q: QTensor) -> jax.Array:
    """Returns the mean error of each bin of the grid, in grid units.

    e_i = E[rho(t) - t | rho(t) = q_i],  sum_i p_i e_i = b E[t]

    Args:
      x: what `q` was quantized from.
      q: a quantized tensor.

    Returns:
      Float32 [K], ascending as in `occupancy`; 0 for a bin without elements.

    Raises:
      ValueError: an array that `q` was not made of.

    Example:
      >>> import jax.numpy as jnp
      >>> from fp4jax.numerics import INT2, Quantizer, quantize
      >>> x = jnp.array([4.0, 0.5, -2.5, 1.0])
      >>> bin_error(x, quantize(x, Quantizer(INT2, block=4))).tolist()
      [-0.75, 0.75]
    """
    error = _rounded(q) - _scaled(x, q, caller="bin_error")
    weight = _weight(q)
    return _by_code(q, lambda hit: _mean(error, jnp.where(hit, weight, weight * 0)))


def geometric_bias(x: jax.Array, q: QTensor) -> jax.Array:
    """Returns the part of the bias that unequal steps of the grid explain.

    geo = sum_i p_i (2 q_i - q_(i-1) - q_(i+1)) / 4 / E[t],  0 < i < K - 1

    The summand is the mean error of a bin in which t is uniform. It is negative where
    the step doubles, on E2M1 at 2 and 4, and zero on a uniform grid. The bins at both
    ends are left out, as published, though their errors, of opposite sign, are as
    large: see `bin_error`.

    Args:
      x: what `q` was quantized from.
      q: a quantized tensor.

    Returns:
      Float32 scalar; 0 of zeros.

    Raises:
      ValueError: an array that `q` was not made of.
    References: UFP4, arXiv 2606.20381, Eq. 2.

    Example:
      >>> import jax.numpy as jnp
      >>> from fp4jax.numerics import E2M1, Quantizer, quantize
      >>> x = jnp.array([6.0, 4.0, 2.0, 0.0])
      >>> geometric_bias(x, quantize(x, Quantizer(E2M1, block=4))).item()
      -0.03125
    """
    t = _scaled(x, q, caller="geometric_bias")
    grid = np.array(q.quantizer.grid.magnitudes)
    error = np.zeros(grid.size, np.float32)
    error[1:-1] = (2 * grid[1:-1] - grid[:-2] - grid[2:]) / 4
    return ratio(jnp.sum(occupancy(q) * error), _mean(t, _weight(q)), empty=0)


def saturation_rate(x: jax.Array, q: QTensor) -> jax.Array:
    """Returns the share of elements beyond the grid, t > g_max.

    A scale that was rounded down, or clamped, leaves them there; they are rounded to
    g_max, by stochastic rounding too, which biases it.

    Args:
      x: what `q` was quantized from.
      q: a quantized tensor.

    Returns:
      Float32 scalar.

    Raises:
      ValueError: an array that `q` was not made of.

    Example:
      >>> import jax.numpy as jnp
      >>> from fp4jax.numerics import E2M1, E8M0, Quantizer, Scale, quantize
      >>> x = jnp.array([7.5, 1.0, 0.0, -6.5])
      >>> q = quantize(x, Quantizer(E2M1, block=4, scale=Scale(E8M0, "floor")))
      >>> saturation_rate(x, q).item()
      0.5
    """
    t = _scaled(x, q, caller="saturation_rate")
    return _mean(t > q.quantizer.grid.max * _SLACK, _weight(q))


def scale_saturation_rate(x: jax.Array, q: QTensor) -> jax.Array:
    """Returns the share of blocks that would need a scale beyond its format.

    Their scale is the format's largest, and yet t > g_max at their amax. That takes a
    tensor scale from an older, smaller amax, or a single level on large values.

    Args:
      x: what `q` was quantized from.
      q: a quantized tensor.

    Returns:
      Float32 scalar; 0 for `F32` and `E8M0`, whose range no float32 exceeds.

    Raises:
      ValueError: an array that `q` was not made of.
    """
    t = _scaled(x, q, caller="scale_saturation_rate")
    beyond = jnp.max(t, tiling_of(q).inside) > q.quantizer.grid.max * _SLACK
    spec = q.quantizer.scale
    clamped = (q.scales >= spec.format.max) & spec.rounds_mantissa
    return _mean(clamped & beyond, _block_weight(q))


def scale_underflow_rate(x: jax.Array, q: QTensor) -> jax.Array:
    """Returns the share of blocks, not zero, whose scale is lost at the format's foot.

    It is 0, or so large that t < g_max / 4 at the amax of the block, which no rule
    chooses within its format's range: the code 0 of `UE5M3` reads as 1, and `E8M0` has
    a lowest exponent.

    Args:
      x: what `q` was quantized from.
      q: a quantized tensor.

    Returns:
      Float32 scalar.

    Raises:
      ValueError: an array that `q` was not made of.
    References: UE5M3, arXiv 2609.02846, section 5.

    Example:
      >>> import jax.numpy as jnp
      >>> from fp4jax.numerics import E2M1, E4M3, Quantizer, Scale, quantize
      >>> x = jnp.array([6.0, 1.0, 1e-3, 0.0])
      >>> q = quantize(x, Quantizer(E2M1, block=2, scale=Scale(E4M3)))
      >>> scale_underflow_rate(x, q).item()
      0.5
    """
    inside = tiling_of(q).inside
    top = jnp.max(_scaled(x, q, caller="scale_underflow_rate"), inside)
    lost = (q.scales == 0) | (top < q.quantizer.grid.max / 4)
    nonzero = jnp.max(magnitudes(x, q, caller="scale_underflow_rate"), inside) > 0
    return _mean(nonzero & lost, _block_weight(q))


def _scaled(x: jax.Array, q: QTensor, *, caller: str) -> jax.Array:
    """Returns t, split into blocks."""
    x = magnitudes(x, q, caller=caller)
    if q.tensor_scale is not None:
        x = x / q.tensor_scale
    scale = _block_scale(q)
    return jnp.where(scale == 0, 0, x / jnp.where(scale == 0, 1, scale))


def _magnitude_codes(q: QTensor) -> jax.Array:
    """Returns the codes without their signs, split into blocks."""
    mask = jnp.uint8((1 << q.quantizer.grid.magnitude_bits) - 1)
    return tiling_of(q).split(q.codes & mask)


def _rounded(q: QTensor) -> jax.Array:
    """Returns rho(t), split into blocks."""
    return formats.decode_magnitude(_magnitude_codes(q), q.quantizer.grid)


def _by_code(q: QTensor, statistic: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """Returns a statistic of the elements of each magnitude code, ascending."""
    found = _magnitude_codes(q)
    codes = jnp.arange(len(q.quantizer.grid.magnitudes), dtype=jnp.uint8)
    # One after another: a mask for each of 127 codes would not fit.
    return lax.map(lambda code: statistic(found == code), codes)


def _block_scale(q: QTensor) -> jax.Array:
    return lax.expand_dims(q.scales, tiling_of(q).inside)


def _weight(q: QTensor) -> jax.Array:
    """Returns `filled`, but NaN throughout a block that is."""
    return jnp.where(jnp.isnan(_block_scale(q)), jnp.nan, filled(q))


def _block_weight(q: QTensor) -> jax.Array:
    """Returns 1 for a block with an element, 0 without, NaN for one that is NaN."""
    holds = jnp.max(filled(q), tiling_of(q).inside)
    return jnp.where(jnp.isnan(q.scales), jnp.nan, holds)


def _mean(x: jax.Array, weight: jax.Array) -> jax.Array:
    """Returns the weighted mean, 0 of nothing; NaN where a weight is."""
    return ratio(jnp.sum(x.astype(jnp.float32) * weight), jnp.sum(weight), empty=0)
