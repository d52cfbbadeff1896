"""Fused quantization: the choice of who does it."""

import functools
import logging
from collections.abc import Sequence
from typing import Any, Literal, get_args

import jax

from fp4jax.kernels import devices
from fp4jax.kernels.quantize import reference
from fp4jax.kernels.quantize.outputs import Output, Quantized
from fp4jax.numerics import Quantizer, Site

Implementation = Literal["mosaic", "xla"]
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
      axis: the contraction axis, not negative.
      other: the second axis of square blocks.
      key: for quantizers that draw.
      amax: float32 [], of the rotated array, where a tensor scale is held.
      start: uint32 row and column of the first element, where x is a part of an array.
      site: which of the key's streams to draw from.
      implementation: "mosaic", a Pallas kernel for NVIDIA GPUs of compute capability
        9.0 and later, or "xla", for every device; None: "mosaic" where it can.

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
    how: dict[str, Any] = {"outputs": outputs, "axis": axis, "other": other}
    how |= {"key": key, "amax": amax, "start": start, "site": site}
    if implementation == "xla":
        return reference.quantize(x, quantizer, **how)
    why = _why_not(x, quantizer, axis, other)
    if why is None:
        from fp4jax.kernels.quantize import mosaic

        return mosaic.quantize(x, quantizer, **how)
    if implementation is not None:
        raise NotImplementedError(
            f"quantize: implementation={implementation!r} cannot do this: {why}. Use "
            "implementation='xla', or None to let the call choose."
        )
    _say(why)
    return reference.quantize(x, quantizer, **how)


def _why_not(
    x: jax.Array, quantizer: Quantizer, axis: int, other: int | None
) -> str | None:
    """Returns why Mosaic cannot do a call, or None."""
    if (why := devices.without_mosaic()) is not None:
        return why
    from fp4jax.kernels.quantize import mosaic

    return mosaic.unsupported(x, quantizer, axis=axis, other=other)


@functools.cache
def _say(why: str) -> None:
    """Logs a choice, each reason once."""
    _log.info("quantize runs in XLA: %s.", why)
