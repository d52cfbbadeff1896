"""The amax of a rotated array on NVIDIA GPUs, in Pallas Mosaic GPU."""

from typing import Any

import jax
import jax.numpy as jnp

from fp4jax.kernels import planes
from fp4jax.kernels.runs import along
from fp4jax.kernels.view import View
from fp4jax.numerics import Site, exact, hadamard
from fp4jax.numerics.hadamard import Hadamard


def tensor_amax(
    x: jax.Array,
    rotation: Hadamard,
    *,
    axis: int,
    key: jax.Array | None,
    site: Site,
    entries: int = 0,
    interpret: Any = None,
) -> jax.Array:
    """Returns max |x H'|, float32 [], NaN where it has one.

    Of each index of some leading axes, whose shape is then that of the result.

    Args:
      x: float32 or bfloat16, of whole runs, and a multiple of 128 of them.
      rotation: of the runs along `axis`.
      axis: the contraction axis.
      key: of signs that are drawn.
      site: which stream of the key they are of.
      entries: how many leading axes; before `axis`, which is not the last then.
      interpret: as `plgpu.kernel` takes it.
    """
    view, size = View.of(x, axis), rotation.size
    signs = hadamard.signs_of(rotation, key, site.signs_stream)
    geometry = along(
        view.axis,
        shape=view.matrix.shape,
        size=size,
        block=size,
        width=view.width(size),
        period=view.matrix.shape[0],
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
        view.matrix,
        *arrays,
        out_type=jax.ShapeDtypeStruct(geometry.grid, jnp.int32),
        interpret=interpret,
    )
    return exact.float_of(jnp.max(parts.reshape(*x.shape[:entries], -1), -1))
