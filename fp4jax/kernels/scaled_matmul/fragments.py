"""How what `wgmma` multiplies lies in the registers of a warpgroup."""

from collections.abc import Sequence

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu import utils
from jaxlib.mlir import ir

from fp4jax.kernels.registers import Layout
from fp4jax.kernels.tile import ROWS

# The operand [64, k] of `wgmma`: a thread has pairs of neighbors along k.
ELEMENTS = Layout.of(((64, 8), (16, 8), (8, 8), (1, 2)), warp=-8, lanes=(-4, -3))
# A byte for each of its pairs, in the same thread: of [64, k / 2], and of [k / 2, 64].
BYTES = Layout.of(((64, 4), (16, 4), (8, 4), (1, 1)), warp=-8, lanes=(-4, -3))
BYTES_DOWN = Layout.of(((4, 64), (4, 16), (4, 8), (1, 1)), warp=-7, lanes=(-3, -4))
OF_ROWS = plgpu.Layout.WGMMA.reduce(1)


def across(x: jax.Array, interpret: bool) -> jax.Array:
    """Returns [n, 64] bytes as [64, n]; every thread keeps its own."""
    if interpret:
        return x.T
    whole = plgpu.ShapeDtypeStruct(x.shape[::-1], x.dtype, layout=BYTES.pallas)

    @plgpu.inline_mgpu(arg_types=(BYTES_DOWN.pallas,), return_type=whole)
    def transposed(_, x):
        return BYTES.array(x.registers.reshape(-1), whole.shape, whole.dtype)

    return transposed(x)


def pairs(words: jax.Array, interpret: bool) -> jax.Array:
    """Returns the bfloat16 in words, from the low half up: [64, n] to [64, 2 n]."""
    shape = words.shape[0], 2 * words.shape[1]
    if interpret:
        return lax.bitcast_convert_type(words, jnp.bfloat16).reshape(shape)
    whole = plgpu.ShapeDtypeStruct(shape, jnp.bfloat16, layout=ELEMENTS.pallas)

    @plgpu.inline_mgpu(arg_types=(BYTES.pallas,), return_type=whole)
    def elements(_, words):
        pair = ir.VectorType.get((2,), ir.BF16Type.get())
        held = [utils.bitcast(word, pair) for word in words.registers.reshape(-1)]
        return ELEMENTS.array(held, shape, jnp.bfloat16)

    return elements(words)


def spread(columns: Sequence[jax.Array], size: int, layout: Layout) -> jax.Array:
    """Returns [64, n size] of n columns [64], each so many times."""
    wide = [
        plgpu.layout_cast(
            lax.broadcast_in_dim(column, (ROWS, size), (0,)), layout.pallas
        )
        for column in columns
    ]
    return wide[0] if len(wide) == 1 else jnp.concatenate(wide, axis=1)
