"""Fused quantization: the choice of who does it."""

from collections.abc import Sequence
from typing import Literal, get_args

import jax

from fp4jax.kernels.choice import chosen
from fp4jax.kernels.log import once
from fp4jax.kernels.quantize import call, partition, reference
from fp4jax.kernels.quantize.backends import KERNELS_OF_GPUS, Backend
from fp4jax.kernels.quantize.outputs import Output, Quantized
from fp4jax.kernels.quantize.way import Inputs, Way
from fp4jax.kernels.quantize.written import Written
from fp4jax.numerics import Quantizer, Site, arguments
from fp4jax.numerics.blocks import Tiling
from fp4jax.numerics.blockwise import Blocks

Implementation = Literal["mosaic", "triton", "xla"]
_say = once(__name__, "quantize runs in XLA: %s.")
_PIECES = "groups whose rows draw by where they stand may go in pieces"


def quantize(
    x: jax.Array,
    quantizer: Quantizer,
    *,
    outputs: Sequence[Output],
    axis: int,
    other: int | None = None,
    key: jax.Array | None = None,
    amax: jax.Array | None = None,
    start: tuple[jax.Array, jax.Array] | None = None,
    site: Site = Site.FPROP_X,
    implementation: Implementation | None = None,
) -> Quantized:
    """Quantizes an array, reading it once and writing what is asked for.

    scale = f(amax over the block of x H'),  value = round(x H' inv)

    Every implementation computes the same codes, random bits included, and the same
    scales; after a rotation of bfloat16 whose sums are not exact, float32 scales may
    differ by one unit in the last place.

    Args:
      x: float32 or bfloat16 array; its gradient is not taken.
      quantizer: what to make of it.
      outputs: which arrays to write.
      axis: the contraction axis.
      other: the second axis of square blocks; of a matrix, by default the other one.
      key: for quantizers that draw.
      amax: float32 [], of the rotated array, where a tensor scale is held.
      start: uint32 row and column of the first element, where x is a part of an array;
        the column that of a whole run.
      site: which of the key's streams to draw from.
      implementation: "mosaic", a Pallas kernel for NVIDIA GPUs of compute capability
        9.0 and later, "triton", one for those of 8.0 and later, which jax-triton calls,
        or "xla", for every device; None: what `KERNELS` has, by default the first of
        them that can.

    Raises:
      NotImplementedError: the implementation that is named cannot do this call here.
      ValueError, TypeError: as `fp4jax.quantize`.
    """
    if implementation not in (None, *get_args(Implementation)):
        raise ValueError(
            "quantize: implementation must be one of "
            f"{', '.join(get_args(Implementation))} or None, got "
            f"implementation={implementation!r}."
        )
    _check_outputs(outputs)
    arguments.check(x, quantizer, key=key, amax=amax)
    axis, other = arguments.checked_axes(x, quantizer, axis=axis, other=other)
    way = Way(quantizer, tuple(outputs), axis, other, site)
    inputs = Inputs(key, amax, start)
    backend = None if implementation == "xla" else _backend(x, way, implementation)
    if backend is None:
        return reference.quantize(x, way, inputs)
    return _cut(call.quantize(x, way, inputs, backend), x.shape, way)


def quantize_blocks(x: jax.Array, way: Way, inputs: Inputs) -> Blocks | Written:
    """Quantizes an array for products, or to be stored.

    Args:
      x: as of `numerics.blockwise.quantize_blocks`.
      way: how. Its outputs are what will be read of the result, where a kernel writes
        it; what is not among them is decoded of `CODES` and `SCALES`, which then must
        be.
      inputs: what else is read; groups only where there is a tensor scale.
    """
    backend = _of_blocks(x, way, inputs)
    if backend is None:
        return reference.quantize_blocks(x, way, inputs)
    return _written(call.quantize(x, way, inputs, backend), x, way)


def quantize_both(
    x: jax.Array, ways: Sequence[tuple[Way, Inputs]]
) -> list[Written] | None:
    """Quantizes an array for two products, where a kernel does from one read of it.

    Args:
      x: as of `quantize_blocks`.
      ways: likewise, and with each its inputs.

    Returns:
      What `quantize_blocks` does of each; None where it would read the array twice.
    """
    backends = {_of_blocks(x, *way) for way in ways}
    backend = backends.pop()
    if backends or backend is None or not backend.reads_once:
        return None
    sizes = [size for way, _ in ways for size in way.runs.items()]
    if any(x.shape[i] % size for i, size in sizes):
        return None
    found = call.quantize_both(x, ways, backend)
    return [_written(of, x, way) for of, (way, _) in zip(found, ways, strict=True)]


def _of_blocks(x: jax.Array, way: Way, inputs: Inputs) -> Backend | None:
    """Returns who quantizes for products; None if XLA does."""
    # Rows that draw by where they stand may go in pieces, which are of no entries.
    has_pieces = way.quantizer.is_stochastic and inputs.tokens is None
    is_of_pieces = inputs.groups is not None and has_pieces
    return _backend(x, way, known=_PIECES if is_of_pieces else None)


def _written(found: Quantized, x: jax.Array, way: Way) -> Written:
    """Returns outputs of kernels as what products read."""
    shape, axis, quantizer = list(x.shape), way.axis, way.quantizer
    shape[axis] += -shape[axis] % quantizer.multiple
    sizes = dict.fromkeys(way.axes, quantizer.block_size)
    return Written(found, quantizer, Tiling(tuple(shape), sizes), axis, axis)


def _backend(
    x: jax.Array,
    way: Way,
    implementation: Implementation | None = None,
    *,
    known: str | None = None,
) -> Backend | None:
    """Returns who quantizes, None if XLA does, which divides its work by itself.

    Args:
      x: what is quantized.
      way: how.
      implementation: as of `quantize`.
      known: why no kernel can, where that is known before.
    """
    candidates = dict(KERNELS_OF_GPUS)
    if implementation is not None:
        candidates = {implementation: candidates[implementation]}
    elif (backend := chosen().quantize) is not None:
        if not backend.is_opaque:
            return None
        candidates = {type(backend).__name__: backend}
    of_any = known or partition.why_not(x, way)
    reasons: dict[str, str] = {}
    for name, backend in candidates.items():
        why = of_any or backend.why_not(x, way)
        if why is None:
            return backend
        reasons[name] = why
    if implementation is not None:
        raise NotImplementedError(
            f"quantize: implementation={implementation!r} cannot do this: "
            f"{reasons[implementation]}. Use implementation='xla', or None to let the "
            "call choose."
        )
    _say("; ".join(f"{name} cannot, {why}" for name, why in reasons.items()))
    return None


def _check_outputs(outputs: Sequence[Output]) -> None:
    if isinstance(outputs, str) or not set(outputs) <= set(Output):
        raise ValueError(
            f"quantize: outputs must be a sequence of {', '.join(Output)}, got "
            f"outputs={outputs!r}."
        )


def _cut(found: Quantized, shape: tuple[int, ...], way: Way) -> Quantized:
    """Returns a result without what was added along the other axis of squares."""
    other, size = way.other, way.quantizer.block_size
    if other is None or shape[other] % size == 0:
        return found
    sizes = {Output.SCALES: -(-shape[other] // size)}
    arrays = {
        output: jax.lax.slice_in_dim(
            array, 0, sizes.get(output, shape[other]), axis=other
        )
        for output, array in found.arrays.items()
    }
    return Quantized(arrays, found.tensor_scale, found.signs)
