"""How long quantization takes, against one elementwise pass over the same array.

    python -m experiments.quantize_speed [--size 4096] [--out FILE]

Prints a table of medians and their ratio to `x * 2 + 1`, each compiled, in this
process, in turns. What XLA makes of the plain JAX reference, without kernels.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import tyro
from rich.console import Console
from rich.table import Table

from experiments import record
from fp4jax.numerics import (
    E2M1,
    E4M3,
    UNIFORM,
    Fresh,
    Hadamard,
    Quantizer,
    Scale,
    Stochastic,
)
from fp4jax.numerics.blockwise import quantize_blocks

_ROTATED = Quantizer(E2M1, scale=Scale(E4M3), rotation=Hadamard(16))
QUANTIZERS = {
    "RHT16, E4M3 scales, E2M1": _ROTATED,
    "RHT16, E4M3 scales, UNIFORM": dataclasses.replace(_ROTATED, grid=UNIFORM),
    "the same without RHT": Quantizer(UNIFORM, scale=Scale(E4M3)),
    "two levels, E2M1": Quantizer(E2M1, scale=Scale(E4M3), tensor_scale=Fresh()),
    "16x16, F32 scales, E2M1": Quantizer(E2M1, (16, 16)),
    "SR, F32 scales, UNIFORM": Quantizer(UNIFORM, rounding=Stochastic()),
}


def operand(quantizer: Quantizer) -> Callable[[jax.Array], jax.Array]:
    """Returns what makes the input of a GEMM from an array, as `dot_general` does."""
    key = jax.random.key(0)
    other = 0 if quantizer.is_square else None
    return lambda x: quantize_blocks(
        x, quantizer, axis=1, other=other, key=key
    ).operand(jnp.bfloat16)


def medians(
    functions: dict[str, Callable], x: jax.Array, *, rounds: int
) -> dict[str, float]:
    """Returns the milliseconds of each compiled function, measured in turns."""
    compiled = {name: jax.jit(f).lower(x).compile() for name, f in functions.items()}
    times: dict[str, list[float]] = {name: [] for name in compiled}
    for _ in range(rounds + 1):  # the first round warms up
        for name, function in compiled.items():
            start = time.perf_counter()
            jax.block_until_ready(function(x))
            times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(t[1:]) for name, t in times.items()}


def main(size: int = 4096, *, rounds: int = 11, out: Path | None = None) -> None:
    """Times quantizers against one elementwise pass.

    Args:
      size: rows and columns of the bfloat16 array.
      rounds: measurements of each.
      out: file for the table, the versions and the device, as JSON.
    """
    x = jax.random.normal(jax.random.key(1), (size, size), jnp.bfloat16)
    yardstick = "x * 2 + 1"
    functions = {yardstick: lambda x: x * 2 + 1}
    functions |= {name: operand(q) for name, q in QUANTIZERS.items()}
    times = medians(functions, x, rounds=rounds)
    device = jax.devices()[0].device_kind
    table = Table("", "ms", "ratio", title=f"{size} x {size} bfloat16 on {device}")
    rows = {
        name: {"ms": ms, "ratio": ms / times[yardstick]} for name, ms in times.items()
    }
    for name, row in rows.items():
        table.add_row(name, *(f"{value:.2f}" for value in row.values()))
    Console().print(table)
    if out:
        record.write_json(out, {"size": size, "rows": rows, **record.setting()})


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
