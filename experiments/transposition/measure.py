"""Rows of blocks beside squares: what two views of a tensor differ by, and its price.

1-D blocks lie along the axis that a product contracts, so x, w and dy are quantized
twice, differently. Squares give both products the same values.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.folder import Row
from experiments.operands.cases import BOTH, GRIDS, SCALES, suits
from experiments.operands.measure import GEMMS, factors, multiply, of_layers
from experiments.operands.tiles import Layers, Tiles
from fp4jax import Operands, dequantize, quantize, stats
from fp4jax.numerics import Quantizer

BLOCKS = (8, 16, 32, 64)
SCALE_NAMES = ("F32", "E4M3 + F32", "E8M0", "E8M0 floor")
TENSORS = ("x", "w", "dy")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quantized:
    """All tensors of a step, dequantized.

    Attributes:
      rows, columns: with 1-D blocks along the last and along the first axis.
      squares: with 2-D blocks.
      mismatch: of rows and columns: share of elements whose scale differs, mean octaves
        between the scales, share whose value differs; an array of the three each.
    """

    rows: Layers
    columns: Layers
    squares: Layers
    mismatch: Layers


def cases(blocks: Sequence[int] = BLOCKS) -> Iterator[Row]:
    """Yields what is measured of a step."""
    for block, scale, grid in itertools.product(blocks, SCALE_NAMES, BOTH):
        if suits(grid, scale):
            yield {"grid": grid, "scale": scale, "block": block}


def quantizer(row: Row) -> Quantizer:
    """Returns the quantizer with 1-D blocks that a row names, to nearest."""
    scale, tensor_scale = SCALES[row["scale"]]
    return Quantizer(GRIDS[row["grid"]], row["block"], scale, tensor_scale=tensor_scale)


def measure(tiles: Tiles, quantizer: Quantizer) -> dict[str, Any]:
    """Returns what the shape of blocks changes in a step, a number for each layer.

    tensors: by x, w, dy: `scale differs` and `value differs` in percent of elements,
      `octaves` between scales, `views` ||rows - columns|| / ||tensor|| in percent, and
      the QSNR of `rows`, `columns` and `squares` in dB.
    products: by 1-D, 2-D and y, dx, dw: error in percent of the product's norm.
    gradients: by 1-D, 2-D and dx, dw: the same beside the gradient that the quantized
      forward pass has, of its own w and x, with dy as it is.
    """
    found, layers = quantized(tiles, quantizer), []
    for path, exact in tiles.layers.items():
        rows, columns = found.rows[path], found.columns[path]
        squares, mismatch = found.squares[path], found.mismatch[path]
        blocks = {"1-D": (rows, columns), "2-D": (squares, squares)}
        views = (exact, rows, columns, squares)
        layers.append(
            {
                "tensors": {
                    name: of_tensor(
                        *(getattr(view, name) for view in views),
                        mismatch=getattr(mismatch, name),
                    )
                    for name in TENSORS
                },
                "products": {k: products(exact, *each) for k, each in blocks.items()},
                "gradients": {k: gradients(exact, *each) for k, each in blocks.items()},
            }
        )
    return of_layers(layers)


def quantized(tiles: Tiles, quantizer: Quantizer) -> Quantized:
    """Returns the views of all tensors under a quantizer with 1-D blocks."""
    found = tiles.map(_views(quantizer), tiles.amaxes(quantizer))
    rows, columns, squares, mismatch = found
    return Quantized(
        rows=tiles.joined(rows),
        columns=tiles.joined(columns),
        squares=tiles.joined(squares),
        mismatch=tiles.means(mismatch),
    )


@functools.lru_cache(maxsize=2)
def _views(quantizer: Quantizer) -> Callable:
    """Returns a function of tiles and amaxes to what `Quantized` is made of."""
    size = quantizer.block_size
    square = dataclasses.replace(quantizer, block=(size, size))

    def of_tile(each: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
        x, amax = each[0], each[1][0] if each[1].size else None
        views = (
            dequantize(quantize(x, how, axis=axis, amax=amax))
            for how, axis in ((quantizer, 1), (quantizer, 0), (square, 1))
        )
        mismatch = stats.transpose_mismatch(x, quantizer, amax=amax)
        shares = (mismatch.scale, mismatch.scale_log2, mismatch.value)
        return (*views, jnp.stack(shares))

    return jax.jit(lambda tiles, amaxes: jax.lax.map(of_tile, (tiles, amaxes)))


def of_tensor(
    x: jax.Array,
    rows: jax.Array,
    columns: jax.Array,
    squares: jax.Array,
    *,
    mismatch: np.ndarray,
) -> dict[str, float]:
    """Returns the figures of one tensor."""
    scale, octaves, value = mismatch
    views, *qsnr = jax.device_get(_of_views(x, rows, columns, squares))
    return {
        "scale differs": 100 * scale,
        "octaves": octaves,
        "value differs": 100 * value,
        "views": views,
        **dict(zip(("rows", "columns", "squares"), qsnr, strict=True)),
    }


@jax.jit
def _of_views(x, rows, columns, squares):
    views = error(x, x + (rows - columns))
    return views, *(stats.qsnr(x, each) for each in (rows, columns, squares))


def products(exact: Operands, rows: Operands, columns: Operands) -> dict[str, float]:
    """Returns the error of y, dx and dw, in percent of their norms."""
    of_exact, of_rounded = factors(exact, exact), factors(rows, columns)
    return {
        names.product: float(_error(*of_exact[gemm], *of_rounded[gemm]))
        for gemm, names in GEMMS.items()
    }


def gradients(exact: Operands, rows: Operands, columns: Operands) -> dict[str, float]:
    """Returns the error of dx and dw beside those of the quantized forward pass."""
    of_rounded = factors(rows, columns)
    (x, w), dy = of_rounded["fprop"], exact.dy  # w is turned
    return {
        "dx": float(_error(dy, w.T, *of_rounded["dgrad"])),
        "dw": float(_error(x.T, dy.T, *of_rounded["wgrad"])),
    }


@jax.jit
def _error(a: jax.Array, b: jax.Array, a_dq: jax.Array, b_dq: jax.Array) -> jax.Array:
    return error(multiply(a, b), multiply(a_dq, b_dq))


def error(x: jax.Array, x_dq: jax.Array) -> jax.Array:
    """Returns ||x_dq - x|| / ||x|| in percent."""
    return 100 * jnp.sqrt(stats.nmse(x, x_dq))
