"""The amax of a rotated matrix on NVIDIA GPUs, in Pallas Mosaic GPU."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fp4jax.kernels import planes
from fp4jax.kernels.runs import along
from fp4jax.numerics import exact


def amax(
    x: jax.Array,
    signs: Sequence[float] | jax.Array,
    *,
    axis: int,
    width: int = 2,
    interpret: Any = None,
) -> jax.Array:
    """Returns max |x H'| of a matrix, float32 [], NaN where it has one.

    Args:
      x: float32 or bfloat16 [r, c].
      signs: of the rotation: numbers, or where they are drawn a float32 array.
      axis: the contraction axis.
      width: runs of each thread.
      interpret: as `plgpu.kernel` takes it.
    """
    size = signs.size if isinstance(signs, jax.Array) else len(signs)
    geometry = along(
        axis,
        shape=x.shape,
        size=size,
        block=size,
        width=width,
        period=x.shape[0],
        interpret=bool(interpret),
    )
    arrays = [signs] if isinstance(signs, jax.Array) else []

    def kernel(x_ref, *refs):
        *drawn, out_ref = refs
        where = geometry.where()
        run: Any = [drawn[0][i] for i in range(size)] if drawn else signs
        tile = planes.rotate(geometry.load(x_ref, where), run)
        largest = exact.bits_of(planes.amax(tile))
        out_ref[where] = jnp.max(largest)

    # As integers, which keep the order of magnitudes, and a NaN.
    parts = geometry.run(
        kernel,
        x,
        *arrays,
        out_type=jax.ShapeDtypeStruct(geometry.grid, jnp.int32),
        interpret=interpret,
    )
    return exact.float_of(jnp.max(parts))
