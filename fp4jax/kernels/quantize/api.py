"""Fused quantization: the choice of who does it."""

import functools
import logging
from collections.abc import Sequence
from typing import Any, Literal, get_args

import jax

from fp4jax.kernels.choice import chosen
from fp4jax.kernels.quantize import call, partition, reference
from fp4jax.kernels.quantize.backends import KERNELS_OF_GPUS, Backend, whole_blocks
from fp4jax.kernels.quantize.outputs import Output, Quantized
from fp4jax.kernels.quantize.written import Written
from fp4jax.numerics import Quantizer, Site, blockwise
from fp4jax.numerics.blocks import Tiling
from fp4jax.numerics.blockwise import Blocks
from fp4jax.numerics.blockwise import quantize_blocks as by_xla
from fp4jax.numerics.groups import Groups

Implementation = Literal["mosaic", "triton", "xla"]
_log = logging.getLogger(__name__)


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
    blockwise.check(x, quantizer, key=key, amax=amax)
    axis, other = blockwise.checked_axes(x, quantizer, axis=axis, other=other)
    how: dict[str, Any] = {"axis": axis, "other": other, "key": key}
    how |= {"amax": amax, "start": start, "site": site}
    backend = None
    if implementation != "xla":
        backend = _backend(x, quantizer, axis, other, implementation)
    if backend is None:
        with partition.explaining(x, quantizer, axis, other):
            return reference.quantize(x, quantizer, outputs=outputs, **how)
    found = call.quantize(x, quantizer, backend=backend, outputs=outputs, **how)
    return _cut(found, x.shape, quantizer, axis, other)


def quantize_blocks(
    x: jax.Array,
    quantizer: Quantizer,
    *,
    outputs: Sequence[Output],
    tokens: jax.Array | None = None,
    groups: Groups | None = None,
    **how: Any,
) -> Blocks | Written:
    """Quantizes an array for products, or to be stored.

    Args:
      x: as of `numerics.blockwise.quantize_blocks`.
      quantizer: likewise.
      outputs: what will be read of the result, where a kernel writes it; what is not
        among them is decoded of `CODES` and `SCALES`, which then must be.
      tokens: likewise.
      groups: likewise.
      **how: likewise, its further arguments.
    """
    if quantizer.tensor_scale is None:
        groups = None
    how |= {"tokens": tokens, "groups": groups}
    backend = _of_blocks(x, quantizer, **how)
    if backend is None:
        with partition.explaining(x, quantizer, how["axis"], how.get("other")):
            return by_xla(x, quantizer, **how)
    found = call.quantize(x, quantizer, backend=backend, outputs=outputs, **how)
    return _written(found, x, quantizer, **how)


def quantize_both(x: jax.Array, ways: Sequence[dict[str, Any]]) -> list[Written] | None:
    """Quantizes an array for two products, where a kernel does from one read of it.

    Args:
      x: as of `quantize_blocks`.
      ways: likewise, the further arguments of each.

    Returns:
      What `quantize_blocks` does of each; None where it would read the array twice.
    """
    backends = {_of_blocks(x, **way) for way in ways}
    backend = backends.pop()
    if backends or backend is None or not backend.reads_once:
        return None
    for way in ways:
        sizes = whole_blocks(way["quantizer"], way["axis"], way["other"])
        if any(x.shape[i] % size for i, size in sizes.items()):
            return None
    found = call.quantize_both(x, [way | {"backend": backend} for way in ways])
    return [_written(of, x, **way) for of, way in zip(found, ways, strict=True)]


def _of_blocks(
    x: jax.Array,
    quantizer: Quantizer,
    *,
    axis: int,
    other: int | None = None,
    tokens: jax.Array | None = None,
    groups: Groups | None = None,
    **how: Any,
) -> Backend | None:
    """Returns who quantizes for products; None if XLA does."""
    del how
    # Rows that draw by where they stand may go in pieces, which are of no entries.
    if groups is not None and tokens is None and quantizer.is_stochastic:
        return None
    return _backend(x, quantizer, axis, other, None)


def _written(
    found: Quantized,
    x: jax.Array,
    quantizer: Quantizer,
    *,
    axis: int,
    other: int | None = None,
    **how: Any,
) -> Written:
    """Returns outputs of kernels as what products read."""
    del how
    shape = list(x.shape)
    shape[axis] += -shape[axis] % quantizer.multiple
    sizes = {i: quantizer.block_size for i in (axis, other) if i is not None}
    return Written(found, quantizer, Tiling(tuple(shape), sizes), axis, axis)


def _backend(
    x: jax.Array,
    quantizer: Quantizer,
    axis: int,
    other: int | None,
    implementation: Implementation | None,
) -> Backend | None:
    """Returns who quantizes, None if XLA does, which divides its work by itself."""
    axes = {"axis": axis, "other": other}
    candidates = dict(KERNELS_OF_GPUS)
    if implementation is not None:
        candidates = {implementation: candidates[implementation]}
    elif (backend := chosen().quantize) is not None:
        if not backend.is_opaque:
            return None
        candidates = {type(backend).__name__: backend}
    of_any = partition.why_not(x, quantizer, **axes)
    reasons: dict[str, str] = {}
    for name, backend in candidates.items():
        why = of_any or backend.why_not(x, quantizer, **axes)
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


def _cut(
    found: Quantized,
    shape: tuple[int, ...],
    quantizer: Quantizer,
    axis: int,
    other: int | None,
) -> Quantized:
    """Returns a result without what was added along the other axis of squares."""
    if other is None or shape[other] % quantizer.block_size == 0:
        return found
    sizes = {Output.SCALES: -(-shape[other] // quantizer.block_size)}
    arrays = {
        output: jax.lax.slice_in_dim(
            array, 0, sizes.get(output, shape[other]), axis=other
        )
        for output, array in found.arrays.items()
    }
    return Quantized(arrays, found.tensor_scale, found.signs)


@functools.cache
def _say(why: str) -> None:
    """Logs a choice, each reason once."""
    _log.info("quantize runs in XLA: %s.", why)
