"""How an array is distributed, over its blocks and as a whole."""

import jax
import jax.numpy as jnp

from fp4jax.numerics import blocks
from fp4jax.numerics.qtensor import QTensor, tiling_of
from fp4jax.numerics.stats.error import ratio
from fp4jax.numerics.stats.split import checked_rotated, filled, magnitudes


def crest_factor(x: jax.Array, q: QTensor) -> jax.Array:
    """Returns the crest factor of each block of an array, rotated if `q` is.

    k = max |x| / sqrt(mean x^2),  1 <= k <= sqrt(B)

    Args:
      x: what `q` was quantized from.
      q: a quantized tensor, which names the blocks.

    Returns:
      Float32, of the shape of `q.scales`; 1 for a block of zeros. The median over
      blocks is what publications give.

    Raises:
      ValueError: an array that `q` was not made of.
    References: INT v.s. FP, arXiv 2510.25602, section 3.

    Example:
      >>> import jax.numpy as jnp
      >>> from fp4jax.numerics import UNIFORM, Quantizer, quantize
      >>> x = jnp.array([1.0, -1.0, 3.0, 0.0])
      >>> crest_factor(x, quantize(x, Quantizer(UNIFORM, block=2))).tolist()
      [1.0, 1.4142135381698608]
    """
    x, inside = magnitudes(x, q, caller="crest_factor"), tiling_of(q).inside
    x = ratio(x, blocks.amax(x, inside), empty=0)  # so that no square overflows
    weight = filled(q)
    mean = ratio(jnp.sum(x**2 * weight, inside), jnp.sum(weight, inside), empty=0)
    return 1 / jnp.sqrt(jnp.where(mean == 0, 1, mean))


def kurtosis(x: jax.Array) -> jax.Array:
    """Returns the kurtosis of an array: how heavy its tails are.

    kurt = E[(x - E[x])^4] / E[(x - E[x])^2]^2

    Args:
      x: array of any float dtype; `rotated` gives the one after a rotation.

    Returns:
      Float32 scalar; 3 for a Gaussian, and, of a constant array, 0.

    Example:
      >>> import jax.numpy as jnp
      >>> kurtosis(jnp.array([1.0, -1.0, 1.0, -1.0])).item()
      1.0
    """
    x = jnp.asarray(x).astype(jnp.float32)
    bounds = jnp.max(x, initial=-jnp.inf), jnp.min(x, initial=jnp.inf)
    # The mean of equal numbers may differ from them by rounding.
    x = x - jnp.where(bounds[0] == bounds[1], bounds[0], jnp.mean(x))
    x = ratio(x, blocks.amax(x), empty=0)
    return ratio(jnp.mean(x**4), jnp.mean(x**2) ** 2, empty=0)


def rotated(x: jax.Array, q: QTensor) -> jax.Array:
    """Returns what the quantizer rounded: H(x), zero-padded along its axis.

    Args:
      x: what `q` was quantized from.
      q: a quantized tensor.

    Returns:
      Array of the shape of `q.codes`: float32 with a rotation, else the dtype of `x`.

    Raises:
      ValueError: an array that `q` was not made of.
    """
    return checked_rotated(x, q, caller="rotated")
