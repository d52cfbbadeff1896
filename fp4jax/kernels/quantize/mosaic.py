"""Fused quantization on NVIDIA GPUs, in Pallas Mosaic GPU."""

from collections.abc import Sequence
from typing import Any

import jax

from fp4jax.kernels.devices import TILE_OF_SQUARES as TILE
from fp4jax.kernels.devices import WARPGROUP
from fp4jax.kernels.geometry import Geometry
from fp4jax.kernels.quantize import matrix
from fp4jax.kernels.quantize.matrix import Prepared
from fp4jax.kernels.quantize.outputs import Output, Quantized
from fp4jax.kernels.quantize.task import Task, perform
from fp4jax.kernels.quantize.way import Inputs, Way
from fp4jax.kernels.runs import along
from fp4jax.kernels.squares import SIDES, Squares
from fp4jax.kernels.view import View
from fp4jax.numerics import E2M1, Quantizer

_MAX_RUN = 128


def quantize_all(
    x: jax.Array, ways: Sequence[tuple[Way, Inputs]], *, interpret: Any = None
) -> list[Quantized]:
    """Quantizes an array in several ways, from one read of memory.

    Args:
      x: the array.
      ways: those of `reference.quantize`, of which `unsupported` is None.
      interpret: as `plgpu.kernel` takes it.
    """
    how = {"is_alone": len(ways) == 1, "interpret": interpret}
    both = [_task(x, *way, **how) for way in ways]
    found = perform([task for _, task in both], x, interpret=interpret)
    pairs = zip(both, found, strict=True)
    return [prepared.quantized(matrices) for (prepared, _), matrices in pairs]


def unsupported(x: jax.Array, way: Way) -> str | None:
    """Returns what of a way `quantize_all` cannot do, or None."""
    axis, run = way.axis, way.quantizer.multiple
    if (why := matrix.unsupported(x, way.quantizer)) is not None:
        return why
    if way.quantizer.is_square:
        return _unsupported_squares(x, way)
    if run % 8 or run > _MAX_RUN:
        return f"a run must be a multiple of 8 up to {_MAX_RUN}, got {run}"
    if x.shape[axis] % run:
        return f"axis {axis} must be a multiple of {run}, got shape={x.shape}"
    if not View.of(x, axis).width(run):
        return f"there must be a multiple of {WARPGROUP} runs, got shape={x.shape}"
    return None


def _unsupported_squares(x: jax.Array, way: Way) -> str | None:
    if (size := way.quantizer.block_size) not in SIDES:
        return f"square blocks must be of {SIDES}, got {size}"
    if (why := matrix.unsupported_axes(x, way)) is not None:
        return why
    if not x.size or any(n % m for n, m in zip(x.shape[-2:], TILE, strict=True)):
        return f"the last two axes must be multiples of {TILE}, got shape={x.shape}"
    return None


def _task(
    x: jax.Array, way: Way, inputs: Inputs, *, is_alone: bool, interpret: Any
) -> tuple[Prepared, Task]:
    """Returns an array as a kernel reads it, and what that does."""
    prepared, quantizer = Prepared.of(x, way, inputs), way.quantizer
    view = prepared.view
    kernel = kernel_of(way, view.axis) if is_alone else "rows_and_columns"
    width = view.width(quantizer.multiple, kernel)
    geometry = geometry_of(view, quantizer, width=width, interpret=bool(interpret))
    return prepared, Task(geometry, quantizer, way.outputs, prepared.scalars)


def kernel_of(way: Way, axis: int) -> str:
    """Returns the entry of `block_sizes` that a quantization has by itself.

    Args:
      way: what is done.
      axis: of the matrix.
    """
    if axis == 1:
        return "rows"
    is_e2m1, packs = way.quantizer.grid == E2M1, Output.OPERAND not in way.outputs
    takes_more = is_e2m1 and (packs or way.quantizer.is_stochastic)
    return "columns_e2m1" if takes_more else "columns"


def geometry_of(
    view: View, quantizer: Quantizer, *, width: int, interpret: bool = False
) -> Geometry:
    """Returns the tiles of a matrix.

    Args:
      view: the matrix.
      quantizer: what to make of it.
      width: runs of each thread.
      interpret: as of `Geometry`.
    """
    fields: dict[str, Any] = {
        "shape": view.matrix.shape,
        "axis": view.axis,
        "block": quantizer.block_size,
        "period": view.period,
        "interpret": interpret,
    }
    if quantizer.is_square:
        return Squares(**fields)
    return along(size=quantizer.multiple, width=width, **fields)
