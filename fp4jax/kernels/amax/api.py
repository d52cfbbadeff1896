"""The amax of an array that is rotated, by the kernel for its matrix."""

from typing import Any

import jax

from fp4jax.kernels.view import View
from fp4jax.numerics import Site, hadamard
from fp4jax.numerics.hadamard import Hadamard


def tensor_amax(
    x: jax.Array,
    rotation: Hadamard,
    *,
    axis: int,
    key: jax.Array | None,
    site: Site,
    interpret: Any = None,
) -> jax.Array:
    """Returns max |x H'|, float32 [].

    Args:
      x: float32 or bfloat16, of whole runs, and a multiple of 128 of them.
      rotation: of the runs along `axis`.
      axis: the contraction axis.
      key: of signs that are drawn.
      site: which stream of the key they are of.
      interpret: as `plgpu.kernel` takes it.
    """
    from fp4jax.kernels.amax import mosaic

    view = View.of(x, axis)
    return mosaic.amax(
        view.matrix,
        hadamard.signs_of(rotation, key, site.signs_stream),
        axis=view.axis,
        width=view.width(rotation.size),
        interpret=interpret,
    )
