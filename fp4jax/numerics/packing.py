"""Two 4-bit codes in a byte."""

from typing import Literal

import jax
import jax.numpy as jnp

Encoding = Literal["sign_magnitude", "twos_complement"]


def pack(
    codes: jax.Array, *, axis: int = -1, encoding: Encoding = "sign_magnitude"
) -> jax.Array:
    """Packs pairs of 4-bit codes, the first of each pair in the low half of its byte.

    Args:
      codes: uint8 sign-magnitude codes below 16, as in `QTensor.codes`; even size along
        `axis`.
      axis: The axis whose neighbours share a byte.
      encoding: "sign_magnitude" keeps E2M1 and E1M2 codes; "twos_complement" writes
        the uniform grid as INT4 (-8 never appears).

    Returns:
      uint8 array with half the size along `axis`.
    """
    axis = axis % codes.ndim
    if codes.dtype != jnp.uint8:
        raise TypeError(f"pack: codes must be uint8, got dtype={codes.dtype}.")
    if codes.shape[axis] % 2:
        raise ValueError(
            f"pack: codes must have an even size along axis {axis}, got "
            f"shape={codes.shape}. Blocks of even size give one."
        )
    codes = _recode(codes, encoding)
    pairs = codes.reshape(*codes.shape[:axis], -1, 2, *codes.shape[axis + 1 :])
    low, high = (jnp.take(pairs, i, axis + 1) for i in (0, 1))
    return low | (high << 4)


def unpack(
    packed: jax.Array, *, axis: int = -1, encoding: Encoding = "sign_magnitude"
) -> jax.Array:
    """The inverse of `pack`: uint8 sign-magnitude codes."""
    axis = axis % packed.ndim
    if packed.dtype != jnp.uint8:
        raise TypeError(f"unpack: packed must be uint8, got dtype={packed.dtype}.")
    pairs = jnp.stack([packed & jnp.uint8(15), packed >> 4], axis + 1)
    shape = (*packed.shape[:axis], 2 * packed.shape[axis], *packed.shape[axis + 1 :])
    return _recode(pairs.reshape(shape), encoding)


def _recode(codes: jax.Array, encoding: Encoding) -> jax.Array:
    """Sign-magnitude to the encoding; the map is its own inverse on 4 bits."""
    if encoding == "sign_magnitude":
        return codes
    if encoding == "twos_complement":
        return jnp.where(codes > 8, jnp.uint8(24) - codes, codes)
    raise ValueError(
        "packing: encoding must be 'sign_magnitude' or 'twos_complement', got "
        f"encoding={encoding!r}."
    )
