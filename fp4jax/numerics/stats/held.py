"""Statistics of a tensor scale that is held while its tensor grows."""

import jax
import jax.numpy as jnp

from fp4jax.numerics.quantizer import Quantizer


def stale_ratio(amax: jax.Array, held: jax.Array) -> jax.Array:
    """Returns how far a tensor has grown past the amax that its scale was made of.

    rho = a_t / g

    Args:
      amax: the largest magnitude of the tensor at hand, any shape.
      held: the held amax, of the same shape; 0 is one not yet seen, computed fresh.

    Returns:
      Float32 of their shape; 1 where nothing is held.

    References: UE5M3, arXiv 2609.02846, section 5.2.

    Example:
      >>> import jax.numpy as jnp
      >>> stale_ratio(jnp.array([3.0, 5.0]), jnp.array([2.0, 0.0])).tolist()
      [1.5, 1.0]
    """
    amax, held = jnp.asarray(amax, jnp.float32), jnp.asarray(held, jnp.float32)
    return jnp.where(held == 0, 1, amax / jnp.where(held == 0, 1, held))


def scale_headroom(ratio: jax.Array, quantizer: Quantizer) -> jax.Array:
    """Returns the growth that block scales can still take before they saturate.

    headroom = U / (T rho),  U = largest block scale,  T = target of the tensor scale

    Below 1 the largest block is clipped.

    Args:
      ratio: rho, of `stale_ratio`; any shape.
      quantizer: one with a tensor scale.

    Returns:
      Float32 of the shape of `ratio`; infinite where it is 0.

    Raises:
      ValueError: a quantizer without a tensor scale.
    References: UE5M3, arXiv 2609.02846, section 5.2.

    Example:
      >>> from fp4jax.numerics import E2M1, UE5M3, Fresh, Quantizer, Scale
      >>> q = Quantizer(E2M1, scale=Scale(UE5M3), tensor_scale=Fresh(2048.0))
      >>> scale_headroom(1.5, q).item()
      20.0
    """
    if quantizer.tensor_scale is None:
        raise ValueError(
            "scale_headroom: quantizer must have a tensor scale, got "
            f"quantizer={quantizer}."
        )
    reach = quantizer.scale.format.max / quantizer.tensor_scale.target
    return reach / jnp.asarray(ratio, jnp.float32)
