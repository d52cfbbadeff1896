"""How much longer than in BF16 the three GEMMs of a linear layer take in a recipe.

    python -m experiments.kernels.linear [--shapes 16384x2048x8192] [--out FILE]

Of a shape m x k x n: y = x w, dx = dy w^T and dw = x^T dy of bfloat16 x and dy and a
float32 w, each with the quantizations that its recipe asks for, in one program. The
default sizes are for a GPU: on a CPU give small ones, --shapes 256x256x256.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from rich.table import Table

import fp4jax
from experiments import record, terminal
from experiments.kernels import arguments
from experiments.kernels.timing import measurements
from fp4jax import recipes
from fp4jax.numerics import E8M0, Scale
from fp4jax.recipes import Recipe
from fp4jax.train import FP8_OPTIONS, JsonLines

_MATRICES = (((1,), (0,)), ((), ()))
_BASE = "bf16"
LAYERS = (16384, 2048, 8192), (16384, 4096, 14336)
RECIPES: dict[str, Callable[[], Recipe]] = {
    _BASE: recipes.bf16,
    "e2m1_ref": recipes.e2m1_ref,
    "ufp4": recipes.ufp4,
    "nvfp4": recipes.nvfp4,
    "ti2d": recipes.ti2d,
    "ti2d, FP8": lambda: dataclasses.replace(recipes.ti2d(), compute="fp8"),
    "mxfp4, FP8": lambda: dataclasses.replace(recipes.mxfp4(), compute="fp8"),
    "ufp4 E8M0, FP8": lambda: dataclasses.replace(
        recipes.ufp4(Scale(E8M0)), compute="fp8"
    ),
}


def gemms(recipe: Recipe) -> Callable[..., tuple[jax.Array, ...]]:
    """Returns what computes y, dx and dw of ((x, w, dy), key)."""

    def function(operands: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        x, w, dy, key = operands
        dot = functools.partial(
            fp4jax.dot_general,
            dimension_numbers=_MATRICES,
            preferred_element_type=jnp.bfloat16,
            recipe=recipe,
            key=key,
        )
        y, backward = jax.vjp(lambda x, w: dot(x, w), x, w)
        return y, *backward(dy)

    return function


def operands(m: int, k: int, n: int, *, seed: int) -> tuple[jax.Array, ...]:
    """Returns x, w, dy and a key; scales of rows and columns are spread."""
    key, *keys = jax.random.split(jax.random.key(seed), 6)
    draw = jax.random.normal
    spread = jnp.exp(draw(keys[3], (m, 1)))
    x = draw(keys[0], (m, k), jnp.bfloat16) * jnp.exp(draw(keys[4], (1, k)))
    w = draw(keys[1], (k, n)) * k**-0.5
    dy = draw(keys[2], (m, n), jnp.bfloat16) * spread
    return x.astype(jnp.bfloat16), w, dy.astype(jnp.bfloat16), key


def main(
    shapes: tuple[arguments.Layer, ...] = LAYERS,
    *,
    names: tuple[Annotated[str, arguments.one_of(RECIPES)], ...] = tuple(RECIPES),
    out: Path | None = None,
) -> None:
    """Times linear layers.

    Args:
      shapes: m x k x n of each layer.
      names: of the recipes, bf16 first; without it there are no ratios.
      out: file to which rows are added as JSON lines, with versions, device and commit.
    """
    table = Table("m x k x n", "recipe", "ms", "again", "TFLOP/s", "over bf16")
    for m, k, n in shapes:
        inputs = [operands(m, k, n, seed=seed) for seed in (0, 1)]
        base = None
        for name in names:
            recipe = RECIPES[name]()
            options = FP8_OPTIONS if recipe.compute == "fp8" else None
            times = measurements(gemms(recipe), inputs, count=2, options=options)
            base = min(times) if name == _BASE else base
            row: dict[str, Any] = {
                "shape": [m, k, n],
                "recipe": name,
                "milliseconds": [1e3 * t for t in times],
                "teraflops": 6 * m * k * n / min(times) / 1e12,
                **({} if base is None else {"ratio": min(times) / base}),
            }
            ms = [f"{t:.3f}" for t in row["milliseconds"]]
            print(f"{m}x{k}x{n}, {name}: {terminal.milliseconds(row)}", flush=True)
            ratio = f"{row['ratio']:.3f}" if "ratio" in row else ""
            table.add_row(f"{m}x{k}x{n}", name, *ms, f"{row['teraflops']:.0f}", ratio)
            if out is not None:
                with JsonLines(out) as file:
                    file.write(row | record.setting())
    terminal.console(100).print(table)


if __name__ == "__main__":
    sys.exit(terminal.command(main))
