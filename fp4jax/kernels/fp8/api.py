"""Square blocks for FP8 tensor cores: whether kernels make them here, and the call."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap

from fp4jax.kernels.choice import chosen
from fp4jax.kernels.quantize.backends import MOSAIC, Mosaic
from fp4jax.numerics import Quantizer


def supports(x: Any, quantizer: Quantizer) -> bool:
    """Returns whether kernels encode a matrix here as it is.

    Where there are several devices, only on a mesh of one, as `jax.set_mesh` sets it.

    Args:
      x: [r, c], an array or its abstract value.
      quantizer: of square blocks under powers of two.
    """
    backend = chosen().quantize or MOSAIC
    if not isinstance(backend, Mosaic) or not _of_one_device():
        return False
    if backend.why_not(x, quantizer, axis=1, other=0) is not None:
        return False
    return not any(
        x.shape[axis] % multiple
        for order in ((1, 0), (0, 1))
        for axis, multiple in backend.multiples(
            x.shape, quantizer, axis=order[0], other=order[1]
        ).items()
    )


def _of_one_device() -> bool:
    """Returns whether arrays are surely whole: no rule divides these kernels yet."""
    mesh = jax.sharding.get_abstract_mesh()
    return jax.device_count() == 1 if mesh.empty else mesh.size == 1


def amax(x: jax.Array, side: int) -> jax.Array:
    """Returns the amax of each square block: float32 [r / side, c / side]."""
    return _amax(side, _interpret())(x)


def encode(
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
      x: float32 or bfloat16 [r, c], which is supported.
      quantizer: of square blocks under powers of two.
      powers: float32 [2, r / b, c / b], powers of two of each block of b x b elements.
      axis: the contraction axis, for quantizers that draw.
      noise: uint32 [4] for these, two words of a key, row and column of the first
        element.
    """
    operation = fp4_encode(quantizer, axis, _interpret())
    return operation(x, powers, *(() if noise is None else (noise,)))


@functools.cache
def _amax(side: int, interpret: Any) -> Any:
    @sequential_vmap
    def operation(x: jax.Array) -> jax.Array:
        from fp4jax.kernels.fp8 import mosaic

        return mosaic.amax(x, side, interpret=interpret)

    return operation


@functools.cache
def fp4_encode(quantizer: Quantizer, axis: int, interpret: Any) -> Any:
    """Returns the operation, which is the same under `jax.vmap` lane by lane."""

    @sequential_vmap
    def operation(x: jax.Array, powers: jax.Array, *noise: jax.Array):
        from fp4jax.kernels.fp8 import mosaic

        drawn = noise[0] if noise else None
        how: dict[str, Any] = {"axis": axis, "noise": drawn, "interpret": interpret}
        return mosaic.encode(x, quantizer, powers.astype(jnp.float32), **how)

    return operation


def _interpret() -> Any:
    backend = chosen().quantize or MOSAIC
    assert isinstance(backend, Mosaic)
    return backend.interpret
