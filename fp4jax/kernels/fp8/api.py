"""Square blocks for FP8 tensor cores: who encodes them, and the calls."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap

from fp4jax.kernels.choice import chosen
from fp4jax.kernels.quantize.backends import MOSAIC, Mosaic
from fp4jax.numerics import Quantizer


def encoder() -> Mosaic | None:
    """Returns the kernels that are chosen, None where arrays may be spread.

    No rule divides these kernels yet. Where there are several devices, they take what
    is on a mesh of one, as `jax.set_mesh` sets it.
    """
    backend, mesh = chosen().quantize or MOSAIC, jax.sharding.get_abstract_mesh()
    is_whole = jax.device_count() == 1 if mesh.empty else mesh.size == 1
    return backend if isinstance(backend, Mosaic) and is_whole else None


def supports(backend: Mosaic, x: Any, quantizer: Quantizer) -> bool:
    """Returns whether kernels encode a matrix here as it is.

    Args:
      backend: the kernels.
      x: [r, c], an array or its abstract value.
      quantizer: of square blocks under powers of two.
    """
    if backend.why_not(x, quantizer, axis=1, other=0) is not None:
        return False
    return not any(
        x.shape[axis] % multiple
        for order in ((1, 0), (0, 1))
        for axis, multiple in backend.multiples(
            x.shape, quantizer, axis=order[0], other=order[1]
        ).items()
    )


def amax(backend: Mosaic, x: jax.Array, side: int) -> jax.Array:
    """Returns the amax of each square block: float32 [r / side, c / side]."""
    return _amax(backend, side)(x)


def encode(
    backend: Mosaic,
    x: jax.Array,
    quantizer: Quantizer,
    powers: jax.Array,
    *,
    axis: int,
    noise: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns a quantized matrix and its transpose in E4M3, from one read.

    values scale powers[0],  (values scale powers[1])^T

    Args:
      backend: the kernels.
      x: float32 or bfloat16 [r, c], which is supported.
      quantizer: of square blocks under powers of two.
      powers: float32 [2, r / b, c / b], powers of two of each block of b x b elements.
      axis: the contraction axis, for quantizers that draw.
      noise: uint32 [4] for these, two words of a key, row and column of the first
        element.
    """
    drawn = () if noise is None else (noise,)
    return _encode(backend, quantizer, axis)(x, powers, *drawn)


# Both operations are under `jax.vmap` what they are lane by lane.
@functools.cache
def _amax(backend: Mosaic, side: int) -> Any:
    @sequential_vmap
    def operation(x: jax.Array) -> jax.Array:
        from fp4jax.kernels.fp8 import mosaic

        return mosaic.amax(x, side, interpret=backend.interpret)

    return operation


@functools.cache
def _encode(backend: Mosaic, quantizer: Quantizer, axis: int) -> Any:
    @sequential_vmap
    def operation(x: jax.Array, powers: jax.Array, *noise: jax.Array):
        from fp4jax.kernels.fp8 import mosaic

        how: dict[str, Any] = {"axis": axis, "noise": noise[0] if noise else None}
        how["interpret"] = backend.interpret
        return mosaic.encode(x, quantizer, powers.astype(jnp.float32), **how)

    return operation
