"""What a quantizer makes of the operands and of the products of every layer.

    fprop  y = x w,    dgrad  dx = dy w^T,    wgrad  dw = x^T dy

Each product is written a b^T, of matrices whose rows it contracts, so that blocks and
rotations run along the rows of both.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from experiments.operands.tiles import Tiles, distributed, quantized
from fp4jax import Operands, stats
from fp4jax.numerics import Quantizer

# By GEMM, operand or product, and name.
Figures = dict[str, dict[str, dict[str, Any]]]


class Gemm(NamedTuple):
    """A product: the names of a, b and a b^T."""

    a: str
    b: str
    product: str


GEMMS = {
    "fprop": Gemm("x", "w", "y"),
    "dgrad": Gemm("dy", "w", "dx"),
    "wgrad": Gemm("x", "dy", "dw"),
}


def measure(tiles: Tiles, quantizer: Quantizer) -> Figures:
    """Returns what a quantizer makes of a step, a number for each layer.

    Of operands `qsnr` in dB, `alpha - 1` in percent and `b_eff`; of products `qsnr` in
    dB and `eta - 1` in percent.
    """
    views, found = quantized(tiles, quantizer), []
    for path, operands in tiles.layers.items():
        exact = factors(operands, operands)
        rounded = factors(views.rows[path], views.columns[path])
        shares = factors(views.row_use[path], views.column_use[path])
        figures = {}
        for gemm, names in GEMMS.items():
            of_gemm = jax.device_get(_of_product(*exact[gemm], *rounded[gemm]))
            figures[gemm] = dict(zip(names, of_gemm, strict=True))
            for name, share in zip(names[:2], shares[gemm], strict=True):
                figures[gemm][name]["b_eff"] = effective(share)
        found.append(figures)
    return of_layers(found)


def distributions(tiles: Tiles, quantizer: Quantizer) -> Figures:
    """Returns how the operands of a step are distributed: `crest` and `kurtosis`.

    crest is the median over blocks of max |x| / rms(x); both are after the rotation.
    """
    rows, columns = distributed(tiles, quantizer)
    found = []
    for path in tiles.layers:
        of_layer = factors(rows[path], columns[path])
        found.append(
            {
                gemm: dict(zip(names[:2], of_layer[gemm], strict=True))
                for gemm, names in GEMMS.items()
            }
        )
    return of_layers(found)


def factors(rows: Operands, columns: Operands) -> dict[str, tuple[Any, Any]]:
    """Returns what belongs to a and b of the three products.

    Args:
      rows: arrays or anything else of each tensor, as it is when rows are contracted.
      columns: the same as it is when columns are; matrices are transposed.
    """
    return {
        "fprop": (rows.x, _turned(columns.w)),
        "dgrad": (rows.dy, rows.w),
        "wgrad": (_turned(columns.x), _turned(columns.dy)),
    }


def multiply(a: jax.Array, b: jax.Array) -> jax.Array:
    """Returns a b^T in float32."""
    return jnp.matmul(a, b.T, precision=jax.lax.Precision.HIGHEST)


def effective(share: np.ndarray) -> float:
    """Returns B_eff = exp(-sum p log p) / K of the shares p of K magnitudes."""
    p = np.asarray(share, np.float64)
    return float(np.exp(-np.sum(p * np.log(np.where(p > 0, p, 1)))) / p.size)


def of_layers(layers: Sequence[Mapping[str, Any]]) -> Figures:
    """Returns figures of several layers as lists of as many numbers.

    As many digits as say something: of the logarithm of an error two, else three.
    """

    def rounded(path: Any, *values: Any) -> list[float]:
        digits = 2 if path[-1].key == "qsnr" else 3
        return [round(float(value), digits) for value in values]

    return jax.tree_util.tree_map_with_path(rounded, *layers)


@jax.jit
def _of_product(a: jax.Array, b: jax.Array, a_dq: jax.Array, b_dq: jax.Array):
    """Returns the figures of a, of b and of a b^T."""
    product, product_dq = multiply(a, b), multiply(a_dq, b_dq)
    pairs = ((a, a_dq), (b, b_dq), (product, product_dq))
    return [
        {
            "qsnr": stats.qsnr(x, x_dq),
            name: 100 * (stats.shrinkage(x, x_dq) - 1),
        }
        for (x, x_dq), name in zip(
            pairs, ("alpha - 1", "alpha - 1", "eta - 1"), strict=True
        )
    ]


def _turned(x: Any) -> Any:
    """Returns the transpose of a matrix; anything else as it is."""
    return x.T if getattr(x, "ndim", 0) == 2 else x
