"""The block sizes that are fastest on the device that is here, for the table of them.

    python -m experiments.kernels.tune [--kernels rows columns] [--out FILE]

Times candidates of each kernel on matrices of several sizes, and prints the device's
part of `fp4jax/kernels/block_sizes.py`.
"""

import itertools
import math
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp

from experiments import record, terminal
from experiments.kernels import grouped
from experiments.kernels.packed import Product
from experiments.kernels.timing import seconds
from fp4jax import recipes
from fp4jax.kernels import devices
from fp4jax.kernels.block_sizes import Sizes
from fp4jax.kernels.grouped_matmul import Hopper
from fp4jax.kernels.quantize import Output
from fp4jax.kernels.scaled_matmul.backends import Mosaic
from fp4jax.kernels.tile import Tile
from fp4jax.kernels.view import View
from fp4jax.numerics import Quantizer, hadamard
from fp4jax.numerics.groups import Groups
from fp4jax.ops.tiles import Tiles
from fp4jax.train import JsonLines

Kernel = Literal[
    "rows",
    "columns",
    "columns_e2m1",
    "rows_and_columns",
    "triton_rows",
    "triton_columns",
    "product",
    "grouped_rows",
    "grouped_weights",
]
KERNELS: tuple[Kernel, ...] = (
    "rows",
    "columns",
    "columns_e2m1",
    "rows_and_columns",
    "product",
    "grouped_rows",
    "grouped_weights",
)
Time = Callable[[Kernel, tuple[int, int], Any], float]

_WIDTHS = (1, 2, 4)
_TILES = tuple(
    Tile(n, k, stages, peers=peers)
    for n, (k, stages), peers in itertools.product(
        (128, 256), ((64, 3), (64, 4), (128, 2)), (1, 2)
    )
)
CANDIDATES: dict[Kernel, Sequence[Any]] = {
    "rows": _WIDTHS,
    "columns": _WIDTHS,
    "columns_e2m1": _WIDTHS,
    "rows_and_columns": _WIDTHS,
    "triton_rows": _WIDTHS,
    "triton_columns": _WIDTHS,
    "product": _TILES,
    "grouped_rows": _TILES,
    "grouped_weights": _TILES,
}
# Of matrices that are quantized, and of products; smallest first.
_MATRICES = ((2048, 2048), (16384, 8192))
SHAPES: dict[Kernel, Sequence[tuple[int, int]]] = {
    "rows": _MATRICES,
    "columns": _MATRICES,
    "columns_e2m1": _MATRICES,
    "rows_and_columns": _MATRICES,
    "triton_rows": _MATRICES,
    "triton_columns": _MATRICES,
    "product": ((1024, 1024), (2048, 8192)),
    "grouped_rows": ((32768, 1024),),
    "grouped_weights": ((64 * 2048, 1024),),
}
_TERMS = 16384  # of a product
_GROUPS, _TOKENS, _FEATURES = 64, 32768, 2048  # of those of groups
# What is timed, along an axis: operands, of random bits too, and what is packed. Times
# of kernels, each of which does a list, add up.
_OPERAND, _PACKED = (Output.OPERAND,), (Output.CODES, Output.SCALES)
_Timed = tuple[Any, tuple[Output, ...], int]  # the first a quantizer
_NEAREST: _Timed = (recipes.ufp4().fprop.x, _OPERAND, 0)
_DRAWN: _Timed = (recipes.ufp4().wgrad.dy, _OPERAND, 0)
_E2M1: tuple[_Timed, ...] = (
    (recipes.nvfp4().wgrad.dy, _OPERAND, 0),
    (recipes.nvfp4().wgrad.x, _PACKED, 0),
)
_DOWN = [[each] for each in (_NEAREST, *_E2M1)]
_ALONG = [[(quantizer, outputs, 1)] for ((quantizer, outputs, _),) in _DOWN]
_TIMED: dict[Kernel, Sequence[Sequence[_Timed]]] = {
    "rows": _ALONG,
    "columns": [[_NEAREST], [_DRAWN]],
    "columns_e2m1": [[each] for each in _E2M1],
    "rows_and_columns": [[(recipes.ufp4().dgrad.dy, _OPERAND, 1), _DRAWN]],
    "triton_rows": _ALONG,
    "triton_columns": _DOWN,
}


def tuned(kernels: Iterable[Kernel], time: Time) -> Sizes:
    """Returns the fastest candidates of each kernel, by the size of the matrix.

    What is fastest for a shape serves up to its size, for the largest beyond it.

    Args:
      kernels: which.
      time: returns the seconds that a kernel takes for a shape and a candidate.

    Raises:
      ValueError: no candidate of a kernel can do a shape.
    """
    found: Sizes = {}
    for kernel in kernels:
        entries: list[tuple[float, Any]] = []
        for shape in SHAPES[kernel]:
            times = {size: time(kernel, shape, size) for size in CANDIDATES[kernel]}
            fastest = min(times, key=lambda size: times[size])
            if math.isinf(times[fastest]):
                raise ValueError(f"{kernel}: no candidate can do shape={shape}.")
            if entries and entries[-1][1] == fastest:
                entries.pop()
            entries.append((math.prod(shape), fastest))
        found[kernel] = (*entries[:-1], (math.inf, entries[-1][1]))
    return found


def literal(kind: str, sizes: Sizes) -> str:
    """Returns a device's part of the table, in Python."""
    lines = [f"    {kind!r}: {{".replace("'", '"')]
    for kernel, entries in sizes.items():
        lines.append(f'        "{kernel}": (')
        for largest, size in entries:
            limit = "math.inf" if math.isinf(largest) else str(largest)
            lines.append(f"            ({limit}, {size}),")
        lines.append("        ),")
    return "\n".join([*lines, "    },"])


def measured(kernel: Kernel, shape: tuple[int, int], size: Any) -> float:
    """Returns the seconds that a kernel takes, infinite where it cannot."""
    try:
        if kernel == "product":
            return _product_seconds(shape, size)
        if kernel.startswith("grouped"):
            return _grouped_seconds(kernel, shape[1], size)
        return sum(_quantize_seconds(kernel, shape, size, q) for q in _TIMED[kernel])
    except ValueError:  # more memory than a program has, or a shape without room
        return math.inf


def _quantize_seconds(
    kernel: Kernel, shape: tuple[int, int], width: int, timed: Sequence[_Timed]
) -> float:
    by_triton = kernel.startswith("triton")

    def call(x: jax.Array) -> Any:
        if by_triton:
            return [_by_triton(x, *each, width=width) for each in timed]
        from fp4jax.kernels.quantize.task import perform

        return perform([_task(x, *each, width=width) for each in timed], x)

    draw = jax.random.normal
    return seconds(call, [draw(key, shape, jnp.bfloat16) for key in _keys()])


def _task(
    x: jax.Array,
    quantizer: Quantizer,
    outputs: Sequence[Output],
    axis: int,
    *,
    width: int,
) -> Any:
    from fp4jax.kernels.quantize import mosaic
    from fp4jax.kernels.quantize.task import Task

    tiles = mosaic.geometry_of(View.of(x, axis), quantizer, width=width)
    return Task(tiles, quantizer, outputs, _scalars(quantizer))


def _by_triton(
    x: jax.Array,
    quantizer: Quantizer,
    outputs: Sequence[Output],
    axis: int,
    *,
    width: int,
) -> Any:
    from fp4jax.kernels.quantize import triton
    from fp4jax.kernels.triton import tiles

    how = {"axis": axis, "period": x.shape[0], "width": width}
    of_runs = tiles.of_runs(x.shape, size=quantizer.multiple, **how)
    return triton.quantize_matrix(x, quantizer, of_runs, outputs, _scalars(quantizer))


def _scalars(quantizer: Quantizer) -> Any:
    from fp4jax.kernels.quantize import matrix

    assert quantizer.rotation is not None
    return matrix.Scalars(
        noise=jnp.arange(4, dtype=jnp.uint32) if quantizer.is_stochastic else None,
        factor=jnp.ones(2) if quantizer.tensor_scale is not None else None,
        signs=hadamard.signs_of(quantizer.rotation, None, 0),
    )


def _why_not(kernel: Kernel) -> str | None:
    """Returns why a kernel cannot run here, or None."""
    if kernel.startswith("triton"):
        return devices.without_triton()
    return devices.without_mosaic()


def _product_seconds(shape: tuple[int, int], tile: Tile) -> float:
    m, n = shape
    quantizer = recipes.nvfp4().wgrad.x
    assert quantizer is not None
    product = Product("dw", quantizer, (_TERMS, m), 0, "lhs", n)
    inputs = [jax.jit(product.operands)(seed) for seed in (0, 1)]
    return seconds(product.by(Mosaic(tile=tile)), inputs)


def _grouped_seconds(kernel: Kernel, n: int, tile: Tile) -> float:
    inputs = []
    for seed in (0, 1):
        x, w, dy, sizes, _ = grouped.operands(_GROUPS, _TOKENS, _FEATURES, n, seed=seed)
        tiles = Tiles.of_sizes(sizes, _TOKENS, rows=16)
        x, dy = tiles.lay_out(x), tiles.lay_out(dy)
        inputs.append((x, w.astype(x.dtype), dy, tiles.groups))
    hopper = Hopper(tile=tile)

    def call(of: tuple[jax.Array, jax.Array, jax.Array, Groups]) -> jax.Array:
        x, w, dy, groups = of
        if kernel == "grouped_rows":
            return hopper.rows(x, w, groups, axis=1, dtype=x.dtype)
        return hopper.weights(x, dy, groups, dtype=jnp.float32)

    return seconds(call, inputs)


def _keys() -> jax.Array:
    return jax.random.split(jax.random.key(0))


def main(*, kernels: tuple[Kernel, ...] = KERNELS, out: Path | None = None) -> int:
    """Times candidates, and prints the table of those that are fastest.

    Args:
      kernels: which: of blocks along rows, down columns, or both, in Triton, of
        products, or of those of groups.
      out: file to which times are added as JSON lines, with versions and device.
    """
    for kernel in kernels:
        if (why := _why_not(kernel)) is not None:
            print(f"error: {kernel}: {why}", file=sys.stderr)
            return 1

    def time(kernel: Kernel, shape: tuple[int, int], size: Any) -> float:
        taken = measured(kernel, shape, size)
        print(f"{kernel} {shape} {size}: {1e6 * taken:.0f} us", flush=True)
        if out is not None:
            row = {"kernel": kernel, "shape": list(shape), "size": str(size)}
            with JsonLines(out) as file:
                file.write(row | {"microseconds": 1e6 * taken} | record.setting())
        return taken

    print(literal(devices.default().device_kind, tuned(kernels, time)))
    return 0


if __name__ == "__main__":
    sys.exit(terminal.command(main))
