"""How fast fused quantization is, against a copy of the same bytes and against XLA.

    python -m experiments.kernels.quantize [--shapes 16384x8192] [--out FILE]

Prints a table of times, of each case and of a copy twice, to show the noise. Ratios are
of the faster times, to that of a copy of as many bytes, read and written, and to XLA's.
On a CPU give a small matrix: --shapes 256x256 --implementations xla.
"""

import dataclasses
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.table import Table

from experiments import record, terminal
from experiments.kernels import arguments
from experiments.kernels.timing import copy_seconds, measurements
from fp4jax import recipes
from fp4jax.kernels.choice import KERNELS, Kernels
from fp4jax.kernels.quantize import (
    MOSAIC,
    Implementation,
    Inputs,
    Output,
    Quantized,
    Way,
    quantize,
    quantize_both,
)
from fp4jax.numerics import (
    E2M1,
    E4M3,
    UNIFORM,
    Hadamard,
    Quantizer,
    Scale,
    Site,
    Stochastic,
)
from fp4jax.train import JsonLines

_RHT = Quantizer(UNIFORM, scale=Scale(E4M3), rotation=Hadamard(16))
_OPERAND = (Output.OPERAND,)
_PACKED = (Output.CODES, Output.SCALES)


@dataclasses.dataclass(frozen=True)
class Case:
    """What to time.

    Attributes:
      name: in the table.
      quantizer: what to make of a matrix.
      axes: the contraction axis; or two, along which one read is to serve.
      outputs: what to write.
    """

    name: str
    quantizer: Quantizer
    axes: tuple[int, ...] = (1,)
    outputs: tuple[Output, ...] = _OPERAND


def _cases() -> Iterator[Case]:
    for grid in (UNIFORM, E2M1):
        rht = dataclasses.replace(_RHT, grid=grid)
        plain = dataclasses.replace(rht, rotation=None)
        sr = dataclasses.replace(rht, rounding=Stochastic())
        for axis, way in ((1, "rows"), (0, "columns")):
            axes = (axis,)
            yield Case(f"{grid} {way}, RHT16", rht, axes)
            yield Case(f"{grid} {way}, no RHT", plain, axes)
            yield Case(f"{grid} {way}, RHT16, SR", sr, axes)
            yield Case(f"{grid} {way}, RHT16, packed", rht, axes, _PACKED)
        yield Case(f"{grid} rows and columns, one read, RHT16", rht, (1, 0))
        yield Case(f"{grid} rows and columns, one read, RHT16, SR", sr, (1, 0))
    for recipe, site in (
        (recipes.ufp4, Site.DGRAD_DY),
        (recipes.nvfp4, Site.FPROP_W),
        (recipes.ti2d, Site.DGRAD_DY),
        (recipes.mxfp8, Site.FPROP_X),
    ):
        quantizer = recipe().sites[site]
        assert quantizer is not None
        yield Case(f"{recipe.__name__}, {site.name.lower()}", quantizer)


CASES = tuple(_cases())


def measure(
    case: Case, shape: tuple[int, int], implementation: Implementation
) -> dict[str, Any]:
    """Returns the row of one case."""

    def function(x: jax.Array) -> list[dict[Output, jax.Array]]:
        return [found.arrays for found in _quantized(case, x, implementation)]

    keys = jax.random.split(jax.random.key(1))
    inputs = [jax.random.normal(key, shape, jnp.bfloat16) for key in keys]
    written = jax.tree.leaves(jax.eval_shape(function, inputs[0]))
    moved = sum(x.size * x.dtype.itemsize for x in (inputs[0], *written))
    taken, again = sorted(measurements(function, inputs, count=2))
    copied, copied_again = sorted(copy_seconds(moved) for _ in range(2))
    return {
        "case": case.name,
        "shape": list(shape),
        "implementation": implementation,
        "microseconds": 1e6 * taken,
        "again_microseconds": 1e6 * again,
        "bytes": moved,
        "terabytes_per_second": moved / taken / 1e12,
        "copy_microseconds": 1e6 * copied,
        "copy_again_microseconds": 1e6 * copied_again,
        "ratio_to_copy": taken / copied,
    }


def _quantized(
    case: Case, x: jax.Array, implementation: Implementation
) -> list[Quantized]:
    """Returns what is made of a matrix along each axis."""
    quantizer, outputs, site = case.quantizer, case.outputs, Site.WGRAD_DY
    # Of the pass over memory alone.
    amax = None if quantizer.tensor_scale is None else jnp.float32(4)
    inputs = Inputs(key=jax.random.key(0), amax=amax)
    if len(case.axes) > 1 and implementation == "mosaic":
        ways = [Way(quantizer, outputs, axis, site=site) for axis in case.axes]
        with KERNELS(Kernels(quantize=MOSAIC)):
            both = quantize_both(x, [(way, inputs) for way in ways])
        if both is not None:
            return [written.quantized for written in both]
    return [
        quantize(
            x,
            quantizer,
            outputs=outputs,
            axis=axis,
            key=inputs.key,
            amax=amax,
            site=site,
            implementation=implementation,
        )
        for axis in case.axes
    ]


def main(
    shapes: tuple[arguments.Matrix, ...] = ((16384, 8192),),
    *,
    implementations: tuple[Implementation, ...] = ("xla", "mosaic"),
    only: str = "",
    out: Path | None = None,
) -> int:
    """Times fused quantization; the exit status is 2 if there is no such case.

    Args:
      shapes: of the bfloat16 matrices, such as 16384x8192.
      implementations: which to time, each in turn; without xla before others, these
        have no ratio to it.
      only: a part of the names of the cases to time; all by default.
      out: file to which rows are added as JSON lines, with versions, device and commit.
    """
    console, cases = (
        terminal.console(140),
        [case for case in CASES if only in case.name],
    )
    if not cases:
        names = "; ".join(case.name for case in CASES)
        print(
            f"error: --only: must be in one of {names}, got {only!r}", file=sys.stderr
        )
        return 2
    table, by_xla = Table(*_COLUMNS), {}
    for shape, case, implementation in itertools.product(
        shapes, cases, implementations
    ):
        try:
            row = measure(case, shape, implementation)
        except NotImplementedError as error:
            console.print(f"{case.name}: {error}")
            continue
        if implementation == "xla":
            by_xla[shape, case] = row["microseconds"]
        if (shape, case) in by_xla:
            row["ratio_to_xla"] = row["microseconds"] / by_xla[shape, case]
        text = "x".join(map(str, shape))
        table.add_row(case.name, text, implementation, *_numbers(row))
        if out is not None:
            with JsonLines(out) as file:
                file.write(row | record.setting())
    console.print(table)
    return 0


_COLUMNS = (
    *("case", "shape", "by", "us", "again", "MB", "TB/s"),
    *("copy us", "again", "over copy", "over xla"),
)


def _numbers(row: dict[str, Any]) -> list[str]:
    taken, copied = (
        [f"{row[f'{name}microseconds']:.0f}" for name in (first, f"{first}again_")]
        for first in ("", "copy_")
    )
    moved = f"{row['bytes'] / 1e6:.0f}", f"{row['terabytes_per_second']:.2f}"
    over_xla = f"{row['ratio_to_xla']:.2f}" if "ratio_to_xla" in row else ""
    return [*taken, *moved, *copied, f"{row['ratio_to_copy']:.2f}", over_xla]


if __name__ == "__main__":
    sys.exit(terminal.command(main))
