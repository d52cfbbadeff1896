"""Square blocks for FP8 tensor cores on NVIDIA GPUs, in Pallas Mosaic GPU."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp

from fp4jax.kernels import planes
from fp4jax.kernels.squares import Squares
from fp4jax.numerics import Quantizer


def amax(x: jax.Array, side: int, *, interpret: Any = None) -> jax.Array:
    """Returns `reference.amax`; `interpret` is as `plgpu.kernel` takes it."""
    geometry = _geometry(x, side, 1, interpret)

    def kernel(x_ref, out_ref):
        where = geometry.where()
        found = planes.amax(geometry.load(x_ref, where))
        geometry.store_blocks(out_ref, where, [found])

    out_type = geometry.blocks(jnp.float32)
    found = geometry.run(kernel, x, out_type=out_type, interpret=interpret)
    return geometry.block_matrix(found)


def encode(
    x: jax.Array,
    quantizer: Quantizer,
    powers: jax.Array,
    *,
    axis: int,
    noise: jax.Array | None = None,
    interpret: Any = None,
) -> tuple[jax.Array, jax.Array]:
    """Returns `reference.encode`, of one read.

    Args:
      x: as of the reference, and so on.
      quantizer: likewise.
      powers: likewise.
      axis: likewise.
      noise: likewise.
      interpret: as `plgpu.kernel` takes it.
    """
    geometry = _geometry(x, quantizer.block_size, axis, interpret)

    def kernel(x_ref, powers_ref, *refs):
        *drawn, out_ref, transposed_ref = refs
        where = geometry.where()
        quantized = planes.quantize(
            geometry.load(x_ref, where),
            quantizer,
            size=geometry.planes_of_block,
            uniform=geometry.uniform(where, drawn[0]) if drawn else None,
            across=geometry.across,
            instructions=geometry.instructions,
        )
        (scale,) = quantized.scales
        of_rows, of_columns = (
            scale * geometry.load_blocks(powers_ref.at[(i, *where)]) for i in (0, 1)
        )
        words = lambda values, factor: geometry.words(
            [planes.scaled(value, factor) for value in values]
        )
        patch = geometry.patch(quantized.values)
        geometry.store_rows(out_ref, where, [words(row, of_rows) for row in patch])
        columns = [words(column, of_columns) for column in zip(*patch, strict=True)]
        geometry.store_columns(transposed_ref, where, [*itertools.chain(*columns)])

    arrays = [] if noise is None else [noise]
    rows, columns = geometry.run(
        kernel,
        x,
        geometry.of_programs(powers),
        *arrays,
        out_type=[
            geometry.elements(8, jnp.float8_e4m3fn),
            geometry.transposed(jnp.float8_e4m3fn),
        ],
        interpret=interpret,
    )
    return geometry.matrix(rows), columns.reshape(x.shape[::-1])


def _geometry(x: jax.Array, side: int, axis: int, interpret: Any) -> Squares:
    shape = x.shape[0], x.shape[1]
    return Squares(shape, axis, side, x.shape[0], bool(interpret))
