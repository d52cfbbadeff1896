"""A quantized tensor, and the array that it was made of, split into blocks."""

import jax
import jax.numpy as jnp
from jax import lax

from fp4jax.numerics import blocks, hadamard
from fp4jax.numerics.qtensor import QTensor, tiling_of


def checked_rotated(x: jax.Array, q: QTensor, *, caller: str) -> jax.Array:
    """Returns `rotated`, and names the function that raises."""
    x = jnp.asarray(x)
    if x.shape != q.shape:
        raise ValueError(
            f"{caller}: x must be the array that q was quantized from, of "
            f"shape={q.shape}, got shape={x.shape}."
        )
    x = blocks.pad_to_multiple(x, {q.axis: max(q.codes.shape[q.axis], 1)})
    return x if q.signs is None else hadamard.rotate(x, q.signs, q.axis)


def magnitudes(x: jax.Array, q: QTensor, *, caller: str) -> jax.Array:
    """Returns |H(x)| in float32, split into blocks."""
    x = jnp.abs(checked_rotated(x, q, caller=caller).astype(jnp.float32))
    return tiling_of(q).split(x)


def filled(q: QTensor) -> jax.Array:
    """Returns 1 for elements of the array and 0 for what fills blocks up, split.

    A rotation fills the last of its runs with elements that count.
    """
    run = 1 if q.quantizer.rotation is None else q.quantizer.rotation.size
    size = q.shape[q.axis] + -q.shape[q.axis] % run
    position = lax.broadcasted_iota(jnp.int32, q.codes.shape, q.axis)
    return tiling_of(q).split((position < size).astype(jnp.float32))
