"""Square blocks for FP8 tensor cores: who encodes them, and the calls."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap

from fp4jax.kernels.choice import chosen
from fp4jax.kernels.fp8 import partition
from fp4jax.kernels.fp8.partition import MATRIX, SQUARES, TRANSPOSED
from fp4jax.kernels.partition import Spread, is_whole
from fp4jax.kernels.quantize.backends import MOSAIC, Mosaic
from fp4jax.kernels.quantize.way import Way
from fp4jax.numerics import Quantizer


def encoder() -> Mosaic | None:
    """Returns the kernels that are chosen, None where no rule divides their work.

    There is one for the automatic axes of a mesh. What is interpreted has none: where
    there are several devices, it takes what is on a mesh of one.
    """
    backend, mesh = chosen().quantize or MOSAIC, jax.sharding.get_abstract_mesh()
    if not isinstance(backend, Mosaic) or not partition.is_divisible(mesh):
        return None
    return backend if backend.is_divisible or is_whole(mesh) else None


def supports(backend: Mosaic, x: Any, quantizer: Quantizer) -> bool:
    """Returns whether kernels encode a matrix here as it is.

    Args:
      backend: the kernels.
      x: [r, c], an array or its abstract value.
      quantizer: of square blocks under powers of two.
    """
    ways = [Way(quantizer, (), axis, 1 - axis) for axis in (1, 0)]
    if backend.why_not(x, ways[0]) is not None:
        return False
    return not any(
        x.shape[axis] % multiple
        for way in ways
        for axis, multiple in backend.multiples(x.shape, way).items()
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
    def part(_: Spread, x: jax.Array) -> list[jax.Array]:
        from fp4jax.kernels.fp8 import mosaic

        whole = partition.padded(x, side, MATRIX)
        found = mosaic.amax(whole, side, interpret=backend.interpret)
        return [found[: x.shape[0] // side, : x.shape[1] // side]]

    operation = partition.divided(part, side, [MATRIX], [SQUARES])
    return sequential_vmap(lambda x: operation(x)[0])


@functools.cache
def _encode(backend: Mosaic, quantizer: Quantizer, axis: int) -> Any:
    side = quantizer.block_size

    def part(
        spread: Spread, x: jax.Array, powers: jax.Array, *noise: jax.Array
    ) -> list[jax.Array]:
        from fp4jax.kernels.fp8 import mosaic

        (r, c), drawn = x.shape, None
        if noise:
            drawn = partition.moved(noise[0], x.shape, axis, spread)
        rows, columns = mosaic.encode(
            partition.padded(x, side, MATRIX),
            quantizer,
            partition.padded(powers.astype(jnp.float32), side, (None, *SQUARES)),
            axis=axis,
            noise=drawn,
            interpret=backend.interpret,
        )
        return [rows[:r, :c], columns[:c, :r]]

    def operation(x: jax.Array, powers: jax.Array, *noise: jax.Array):
        layouts = [MATRIX, (None, *SQUARES), *((None,) for _ in noise)]
        results = [MATRIX, TRANSPOSED]
        return partition.divided(part, side, layouts, results)(x, powers, *noise)

    return sequential_vmap(operation)
