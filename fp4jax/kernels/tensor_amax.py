"""The amax of an array that is rotated, by the kernel for its matrix."""

import math
from typing import Any

import jax

from fp4jax.kernels.devices import WARPGROUP
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

    signs: Any
    if rotation.draws:
        signs = hadamard.sign_vector(rotation, key, site.signs_stream)
    else:
        signs = hadamard.fixed_signs(rotation)
    if axis == x.ndim - 1:
        matrix, along, runs = x.reshape(-1, x.shape[axis]), 1, x.size // rotation.size
    else:
        runs = math.prod(x.shape[axis + 1 :])
        matrix, along = x.reshape(-1, runs), 0
    width = 2 if runs % (2 * WARPGROUP) == 0 else 1
    return mosaic.amax(matrix, signs, axis=along, width=width, interpret=interpret)
