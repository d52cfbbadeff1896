"""Two 4-bit codes in a byte."""

from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax

from fp4jax.numerics import checks
from fp4jax.numerics.formats import Format

Encoding = Literal["sign_magnitude", "twos_complement"]


def fits_half_a_byte(grid: Format) -> bool:
    """Returns whether signed codes of a grid take 4 bits at most."""
    return grid.magnitude_bits < 4


def pack(
    codes: jax.Array, *, axis: int = -1, encoding: Encoding = "sign_magnitude"
) -> jax.Array:
    """Packs pairs of 4-bit codes, the first of each pair in the low half of its byte.

    Args:
      codes: uint8 sign-magnitude codes below 16, as in `QTensor.codes`; even size along
        `axis`.
      axis: the axis whose neighbors share a byte.
      encoding: "sign_magnitude" keeps E2M1 and E1M2 codes; "twos_complement" writes
        the uniform grid as INT4 (-8 never appears).

    Returns:
      uint8 array with half the size along `axis`.

    Raises:
      TypeError: codes that are not uint8.
      ValueError: an odd size along `axis`, no such axis, or an unknown encoding.
    """
    axis = _checked(codes, axis, caller="pack", name="codes", encoding=encoding)
    if codes.shape[axis] % 2:
        raise ValueError(
            f"pack: codes must have an even size along axis {axis}, got "
            f"shape={codes.shape}. Blocks of even size give one."
        )
    pairs = _recode(codes, encoding).reshape(
        *codes.shape[:axis], codes.shape[axis] // 2, 2, *codes.shape[axis + 1 :]
    )
    first, second = (
        lax.index_in_dim(pairs, i, axis + 1, keepdims=False) for i in (0, 1)
    )
    return first | (second << 4)


def unpack(
    packed: jax.Array, *, axis: int = -1, encoding: Encoding = "sign_magnitude"
) -> jax.Array:
    """Unpacks bytes into 4-bit codes: the inverse of `pack`.

    Args:
      packed: uint8, two codes a byte along `axis`.
      axis: as given to `pack`.
      encoding: as given to `pack`.

    Returns:
      uint8 sign-magnitude codes with twice the size along `axis`.

    Raises:
      TypeError: bytes that are not uint8.
      ValueError: no such axis, or an unknown encoding.

    Example:
      >>> import jax.numpy as jnp
      >>> unpack(pack(jnp.array([1, 15, 0, 8], jnp.uint8))).tolist()
      [1, 15, 0, 8]
    """
    axis = _checked(packed, axis, caller="unpack", name="packed", encoding=encoding)
    pairs = jnp.stack([packed & jnp.uint8(15), packed >> 4], axis + 1)
    shape = (*packed.shape[:axis], 2 * packed.shape[axis], *packed.shape[axis + 1 :])
    return _recode(pairs.reshape(shape), encoding)


def _checked(x: jax.Array, axis: int, *, caller: str, name: str, encoding: str) -> int:
    """Returns the axis, not negative; raises where an argument cannot be honoured."""
    if x.dtype != jnp.uint8:
        raise TypeError(f"{caller}: {name} must be uint8, got dtype={x.dtype}.")
    if encoding not in get_args(Encoding):
        raise ValueError(
            f"{caller}: encoding must be one of {get_args(Encoding)}, got "
            f"encoding={encoding!r}."
        )
    return checks.checked_axis(x, axis, caller=caller)


def _recode(codes: jax.Array, encoding: Encoding) -> jax.Array:
    """Converts sign-magnitude to the encoding; the map is its own inverse on 4 bits."""
    if encoding == "sign_magnitude":
        return codes
    return jnp.where(codes > 8, jnp.uint8(24) - codes, codes)
