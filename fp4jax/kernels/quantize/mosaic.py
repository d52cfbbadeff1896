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
from fp4jax.kernels.runs import along
from fp4jax.kernels.squares import SIDES, Squares
from fp4jax.kernels.view import View
from fp4jax.numerics import Quantizer

_MAX_RUN = 128


def quantize(
    x: jax.Array, quantizer: Quantizer, *, interpret: Any = None, **how: Any
) -> Quantized:
    """Quantizes an array as `reference.quantize` does, where `unsupported` is None."""
    way = {"quantizer": quantizer} | how
    (found,) = quantize_all(x, [way], interpret=interpret)
    return found


def quantize_all(
    x: jax.Array, ways: Sequence[dict[str, Any]], *, interpret: Any = None
) -> list[Quantized]:
    """Quantizes an array in several ways, from one read of memory.

    Args:
      x: the array.
      ways: the further arguments of `reference.quantize`, of each.
      interpret: as `plgpu.kernel` takes it.
    """
    both = [_task(x, interpret=interpret, **way) for way in ways]
    found = perform([task for _, task in both], x, interpret=interpret)
    pairs = zip(both, found, strict=True)
    return [prepared.quantized(matrices) for (prepared, _), matrices in pairs]


def unsupported(
    x: jax.Array, quantizer: Quantizer, *, axis: int, other: int | None = None
) -> str | None:
    """Returns what of a call `quantize` cannot do, or None."""
    run = quantizer.multiple
    if (why := matrix.unsupported(x, quantizer)) is not None:
        return why
    if quantizer.is_square:
        return _unsupported_squares(x, quantizer, axis, other)
    if run % 8 or run > _MAX_RUN:
        return f"a run must be a multiple of 8 up to {_MAX_RUN}, got {run}"
    if x.shape[axis] % run:
        return f"axis {axis} must be a multiple of {run}, got shape={x.shape}"
    if not View.of(x, axis).width(run):
        return f"there must be a multiple of {WARPGROUP} runs, got shape={x.shape}"
    return None


def _unsupported_squares(
    x: jax.Array, quantizer: Quantizer, axis: int, other: int | None
) -> str | None:
    if quantizer.block_size not in SIDES:
        return f"square blocks must be of {SIDES}, got {quantizer.block_size}"
    if quantizer.rotation is not None:
        return "square blocks must not be rotated"
    if (why := matrix.unsupported_axes(x, axis, other)) is not None:
        return why
    if not x.size or any(n % m for n, m in zip(x.shape[-2:], TILE, strict=True)):
        return f"the last two axes must be multiples of {TILE}, got shape={x.shape}"
    return None


def _task(
    x: jax.Array,
    quantizer: Quantizer,
    *,
    outputs: Sequence[Output],
    interpret: Any,
    **how: Any,
) -> tuple[Prepared, Task]:
    """Returns an array as a kernel reads it, and what that does."""
    prepared = Prepared.of(x, quantizer, **how)
    geometry = geometry_of(prepared.view, quantizer, interpret=bool(interpret))
    return prepared, Task(geometry, quantizer, outputs, prepared.scalars)


def geometry_of(
    view: View, quantizer: Quantizer, *, width: int = 0, interpret: bool = False
) -> Geometry:
    """Returns the tiles of a matrix.

    Args:
      view: the matrix.
      quantizer: what to make of it.
      width: runs of each thread; 0: those of `block_sizes`.
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
    size = quantizer.multiple
    return along(size=size, width=width or view.width(size), **fields)
