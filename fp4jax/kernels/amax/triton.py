"""The amax of a rotated array on NVIDIA GPUs, in Triton."""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl

from fp4jax.kernels.triton import arithmetic, memory
from fp4jax.kernels.triton.launch import launch
from fp4jax.kernels.triton.tiles import of_runs
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
    capability: int | None = None,
) -> jax.Array:
    """Returns max |x H'|, float32 [], NaN where it has one.

    Of each index of some leading axes, whose shape is then that of the result.

    Args:
      x: float32 or bfloat16, of whole runs.
      rotation: of the runs along `axis`.
      axis: the contraction axis.
      key: of signs that are drawn.
      site: which stream of the key they are of.
      entries: how many leading axes; before `axis`, which is not the last then.
      capability: as of `launch`.
    """
    view, size = View.of(x, axis), rotation.size
    tiles = of_runs(view.matrix.shape, axis=view.axis, size=size, period=view.period)
    signs = hadamard.signs_of(rotation, key, site.signs_stream)
    drawn = {"signs": signs} if isinstance(signs, jax.Array) else {}
    # As integers, which keep the order of magnitudes, and a NaN.
    (parts,) = launch(
        amax_of_tile,
        view.matrix,
        memory.words(drawn),
        out_types=[jax.ShapeDtypeStruct((tiles.programs,), jnp.int32)],
        programs=tiles.programs,
        capability=capability,
        TILES=tiles,
        SIGNS=None if drawn else signs,
        SIZE=size,
    )
    return exact.float_of(jnp.max(parts.reshape(*x.shape[:entries], -1), -1))


@triton.jit
def amax_of_tile(
    x,
    words,
    parts,
    TILES: tl.constexpr,
    SIGNS: tl.constexpr,
    SIZE: tl.constexpr,
):
    """Writes the amax of this program's tile, once it is rotated.

    Args:
      x: the matrix.
      words: signs that are drawn.
      parts: the output.
      TILES: of the matrix.
      SIGNS: of the rotation, where they are not among the words.
      SIZE: of a run.
    """
    tile = memory.load(x, TILES).to(tl.float32)
    signs = memory.signs(words, SIGNS, tile.shape[1], SIZE)
    tile, norm = arithmetic.rotate(tile, signs, SIZE)
    largest = tl.max(tl.max(arithmetic.magnitude_bits(tile), 1), 0)
    largest = arithmetic.float_of(largest) * norm
    tl.store(parts + tl.program_id(0), arithmetic.magnitude_bits(largest))
