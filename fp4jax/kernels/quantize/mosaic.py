"""Fused quantization on NVIDIA GPUs, in Pallas Mosaic GPU."""

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fp4jax.kernels.devices import TILE_OF_SQUARES as TILE
from fp4jax.kernels.devices import WARPGROUP
from fp4jax.kernels.geometry import Geometry, launch
from fp4jax.kernels.quantize import matrix
from fp4jax.kernels.quantize.matrix import Scalars
from fp4jax.kernels.quantize.outputs import Output, Quantized
from fp4jax.kernels.quantize.task import Task
from fp4jax.kernels.runs import along
from fp4jax.kernels.squares import SIDES, Squares
from fp4jax.kernels.view import View
from fp4jax.numerics import Quantizer

_MAX_RUN = 128


def quantize(
    x: jax.Array,
    quantizer: Quantizer,
    *,
    outputs: Sequence[Output],
    interpret: Any = None,
    **how: Any,
) -> Quantized:
    """Quantizes an array as `matrix.quantize` does, where `unsupported` is None."""

    def kernel(view: View, scalars: Scalars) -> dict[Output, jax.Array]:
        return quantize_matrix(
            view.matrix,
            quantizer,
            axis=view.axis,
            outputs=outputs,
            scalars=scalars,
            period=view.period,
            width=view.width(quantizer.multiple),
            interpret=interpret,
        )

    return matrix.quantize(x, quantizer, kernel, **how)


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


def quantize_matrix(
    x: jax.Array,
    quantizer: Quantizer,
    *,
    axis: int,
    outputs: Sequence[Output],
    scalars: Scalars,
    period: int,
    width: int,
    interpret: Any = None,
) -> dict[Output, jax.Array]:
    """Quantizes a matrix in blocks along one axis of it.

    Args:
      x: float32 or bfloat16 [r, c].
      quantizer: of nearest or stochastic rounding, without candidates.
      axis: the contraction axis.
      outputs: what to write.
      scalars: further inputs.
      period: rows of each of several matrices that stand one above the other, where
        `axis` is 0.
      width: runs of each thread.
      interpret: as `plgpu.kernel` takes it.

    Returns:
      Of each output: the operand [r, c]; codes [r, c], of 4-bit grids half as many
      along `axis`, uint8; scales, one for each block.
    """
    geometry = _geometry(
        quantizer,
        shape=x.shape,
        axis=axis,
        period=period,
        width=width,
        interpret=bool(interpret),
    )
    task = Task(geometry, quantizer, outputs, scalars)
    (found,) = perform([task], x, interpret=interpret)
    return found


def perform(
    tasks: Sequence[Task], x: jax.Array, *, interpret: Any = None
) -> list[dict[Output, jax.Array]]:
    """Quantizes a matrix in several ways, from one read of memory.

    Of neighboring programs each does a tile of a task, so many of each that all tasks
    are at one place of the matrix: what one has read, others find in the cache.

    Args:
      tasks: of the matrix.
      x: float32 or bfloat16 [r, c].
      interpret: as `plgpu.kernel` takes it.

    Returns:
      The outputs of each task.
    """
    inputs, out_types = [task.inputs(x) for task in tasks], [t.out_types for t in tasks]
    counts = [task.geometry.programs for task in tasks]
    shares = [count // math.gcd(*counts) for count in counts]
    starts = list(itertools.accumulate(shares, initial=0))

    def kernel(*refs):
        references = iter(refs)
        given = [[next(references) for _ in each] for each in inputs]
        written = [[next(references) for _ in each] for each in out_types]
        turn, place = divmod(lax.axis_index("program"), sum(shares))

        def of_task(i: int) -> None:
            tile = turn * shares[i] + place - starts[i]
            tasks[i].run(tasks[i].geometry.where(tile), given[i], written[i])

        which = sum((place >= start).astype(jnp.int32) for start in starts[1:-1])
        lax.switch(which, [functools.partial(of_task, i) for i in range(len(tasks))])

    found = launch(
        kernel,
        *itertools.chain(*inputs),
        programs=sum(counts),
        out_type=[*itertools.chain(*out_types)],
        interpret=interpret,
    )
    arrays = iter(found)
    return [task.matrices([next(arrays) for _ in task.outputs]) for task in tasks]


def _geometry(quantizer: Quantizer, *, width: int, **fields: Any) -> Geometry:
    fields["block"] = quantizer.block_size
    if quantizer.is_square:
        return Squares(**fields)
    return along(size=quantizer.multiple, width=width, **fields)
