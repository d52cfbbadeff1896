"""How fast products of a packed operand are, against decoding it to memory first.

    python -m experiments.kernels.packed [--shapes 16384x2048x8192] [--out FILE]

Of a linear layer m x k x n: dw = x^T dy with x packed as its backward pass keeps it,
and dx = dy w^T with w packed once for a step. Prints times: of the kernel, of XLA,
which decodes first, and of the product alone of an operand that was decoded before. The
results of kernel and XLA, whose sums have another order, are compared. The default
sizes are for a GPU: on a CPU give small ones, --shapes 256x256x256.
"""

import dataclasses
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from rich.table import Table

from experiments import record, terminal
from experiments.kernels import arguments
from experiments.kernels.linear import LAYERS
from experiments.kernels.timing import measurements
from fp4jax import recipes
from fp4jax.kernels.quantize import Output, Quantized, Written, quantize
from fp4jax.kernels.scaled_matmul import MOSAIC, XLA, Side
from fp4jax.numerics import Quantizer
from fp4jax.numerics.blocks import Tiling
from fp4jax.recipes import Recipe
from fp4jax.train import JsonLines

RECIPES: dict[str, Callable[[], Recipe]] = {
    "ufp4": recipes.ufp4,
    "nvfp4": recipes.nvfp4,
    "mxfp4": recipes.mxfp4,
    "ti2d": recipes.ti2d,
}
_BY = ("mosaic", "xla", "decoded")
_STORED = (Output.CODES, Output.SCALES)


@dataclasses.dataclass(frozen=True)
class Product:
    """A product of matrices of which one is packed.

    Attributes:
      name: in the table.
      quantizer: what packs.
      shape: of the packed matrix.
      axis: what is contracted, of both matrices.
      side: where the packed one stands.
      free: of the other matrix.
    """

    name: str
    quantizer: Quantizer
    shape: tuple[int, int]
    axis: int
    side: Side
    free: int

    def packed(self, arrays: dict[Output, jax.Array]) -> Written:
        """Returns the packed matrix of its codes and scales."""
        size = self.quantizer.block_size
        axes = (0, 1) if self.quantizer.is_square else (self.axis,)
        tiling = Tiling(self.shape, dict.fromkeys(axes, size))
        found = Quantized(arrays, None, None)
        return Written(found, self.quantizer, tiling, self.axis, self.axis)

    def operands(self, seed: int) -> tuple[dict[Output, jax.Array], jax.Array]:
        """Returns codes and scales, and the other matrix, of random numbers."""
        keys = jax.random.split(jax.random.key(seed), 3)
        x = jax.random.normal(keys[0], self.shape, jnp.bfloat16)
        other = 1 - self.axis if self.quantizer.is_square else None
        how: dict[str, Any] = {"axis": self.axis, "other": other, "key": keys[2]}
        if self.quantizer.tensor_scale is not None:
            how["amax"] = jnp.float32(4)
        arrays = quantize(x, self.quantizer, outputs=_STORED, **how).arrays
        k = self.shape[self.axis]
        shape = (k, self.free) if self.axis == 0 else (self.free, k)
        return arrays, jax.random.normal(keys[1], shape, jnp.bfloat16)

    def by(self, backend: Any) -> Callable[..., jax.Array]:
        """Returns what computes the product of `operands` by a backend."""

        def function(operands: tuple[dict[Output, jax.Array], jax.Array]) -> jax.Array:
            arrays, other = operands
            how: dict[str, Any] = {"axis": self.axis, "side": self.side}
            return backend.multiply(
                self.packed(arrays), other, factors=(), dtype=jnp.bfloat16, **how
            )

        return function

    def why_not(self, backend: Any) -> str | None:
        """Returns why a backend cannot, or None."""
        (arrays, other) = jax.eval_shape(lambda: self.operands(0))
        packed = self.packed(arrays)
        return backend.why_not(packed, other, axis=self.axis, dtype=jnp.bfloat16)


def products(recipe: Recipe, m: int, k: int, n: int) -> tuple[Product, ...]:
    """Returns those of a linear layer whose packed operand a recipe quantizes."""
    found = []
    if recipe.wgrad.x is not None:
        found.append(Product("dw", recipe.wgrad.x, (m, k), 0, "lhs", n))
    if recipe.dgrad.w is not None:
        found.append(Product("dx", recipe.dgrad.w, (k, n), 1, "rhs", m))
    return tuple(found)


def measure(product: Product) -> dict[str, Any]:
    """Returns the row of one product."""
    inputs = [jax.jit(product.operands)(seed) for seed in (0, 1)]
    decode = jax.jit(lambda arrays: product.packed(arrays).operand(jnp.bfloat16))

    def plain(operands: tuple[jax.Array, jax.Array]) -> jax.Array:
        first = operands if product.side == "lhs" else operands[::-1]
        dims = (((product.axis,), (product.axis,)), ((), ()))
        found = jax.lax.dot_general(*first, dims, preferred_element_type=jnp.float32)
        return found.astype(jnp.bfloat16)

    row: dict[str, Any] = {"xla": measurements(product.by(XLA), inputs, count=2)}
    decoded = [(decode(arrays), other) for arrays, other in inputs]
    row["decoded"] = measurements(plain, decoded, count=2)
    if (why := product.why_not(MOSAIC)) is not None:
        return row | {"why_not": why}
    row["mosaic"] = measurements(product.by(MOSAIC), inputs, count=2)
    found, expected = (jax.jit(product.by(b))(inputs[0]) for b in (MOSAIC, XLA))
    return row | {"difference": float(_difference(found, expected))}


@jax.jit
def _difference(found: jax.Array, expected: jax.Array) -> jax.Array:
    """Returns the relative L2 distance."""
    a, b = (x.astype(jnp.float32) for x in (found, expected))
    return jnp.linalg.norm(a - b) / jnp.linalg.norm(b)


def main(
    shapes: tuple[arguments.Layer, ...] = LAYERS,
    *,
    names: tuple[Annotated[str, arguments.one_of(RECIPES)], ...] = tuple(RECIPES),
    out: Path | None = None,
) -> None:
    """Times products of packed operands.

    Args:
      shapes: m x k x n of each layer.
      names: of the recipes whose quantizers pack.
      out: file to which rows are added as JSON lines, with versions, device and commit.
    """
    console = terminal.console(120)
    table = Table(
        "m x k x n",
        "recipe",
        "of",
        *(f"{by} us" for by in _BY),
        "TFLOP/s",
        "over xla",
        "differs",
    )
    for m, k, n in shapes:
        text = f"{m}x{k}x{n}"
        for name in names:
            for product in products(RECIPES[name](), m, k, n):
                row = {"shape": [m, k, n], "recipe": name, "product": product.name}
                row |= measure(product)
                table.add_row(text, name, product.name, *_cells(row))
                if "why_not" in row:
                    console.print(f"{text} {name} {product.name}: {row['why_not']}.")
                if out is not None:
                    with JsonLines(out) as file:
                        file.write(row | record.setting())
    console.print(table)


def _cells(row: dict[str, Any]) -> list[str]:
    times = [
        "; ".join(f"{1e6 * t:.0f}" for t in row[by]) if by in row else "-" for by in _BY
    ]
    if "mosaic" not in row:
        return [*times, "", "", ""]
    m, k, n = row["shape"]
    taken = min(row["mosaic"])
    rate = f"{2 * m * k * n / taken / 1e12:.0f}"
    return [*times, rate, f"{taken / min(row['xla']):.3f}", f"{row['difference']:.1e}"]


if __name__ == "__main__":
    sys.exit(terminal.command(main))
