"""The products of queries, keys and values, by cuDNN where it can."""

import jax
import jax.numpy as jnp

from fp4jax.kernels import devices
from fp4jax.kernels.log import once

_say = once(__name__, "attention runs in XLA: %s.")

_CAPABILITY = 8  # of the GPUs that cuDNN has fused attention for
_HOPPER = 9
_LARGEST_HEADS = {False: 128, True: 256}  # before Hopper, and since


def attend(
    query: jax.Array, key: jax.Array, value: jax.Array, *, mask: jax.Array | None
) -> jax.Array:
    """Returns softmax(q k^T / sqrt(e)) v over earlier tokens that the mask admits.

    On an NVIDIA GPU cuDNN computes it where it can, without the matrix of all pairs of
    tokens; without a mask it skips the later ones. XLA does otherwise.

    Args:
      query: [b, t, h, e].
      key: [b, t, h_kv, e]; each head serves h / h_kv heads of queries.
      value: likewise.
      mask: bool [b, 1, t, t]; None admits all.

    Returns:
      [b, t, h, e] of the dtype of the query.
    """
    why = without_cudnn(query.dtype, length=query.shape[1], head_dim=query.shape[3])
    if why is not None:
        _say(why)
    return jax.nn.dot_product_attention(
        query,
        key,
        value,
        mask=mask,
        is_causal=True,
        implementation="xla" if why is not None else "cudnn",
    )


def without_cudnn(
    dtype: jax.typing.DTypeLike, *, length: int, head_dim: int
) -> str | None:
    """Returns why cuDNN cannot attend on the default device, or None where it can.

    Args:
      dtype: of queries, keys and values.
      length: tokens of a row.
      head_dim: size of a head.
    """
    if (why := devices.too_small(_CAPABILITY)) is not None:
        return why
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f"queries must be bfloat16 or float16, got {jnp.dtype(dtype)}"
    largest = _LARGEST_HEADS[devices.capability() >= _HOPPER]
    if head_dim % 8 or head_dim > largest:
        return f"head_dim must be a multiple of 8 and at most {largest}, got {head_dim}"
    if length % 2:
        return f"rows must have an even number of tokens, got {length}"
    return None
