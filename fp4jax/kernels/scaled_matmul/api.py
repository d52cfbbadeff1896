"""Products of a packed operand: the choice of who computes them."""

from collections.abc import Sequence
from typing import Literal, get_args

import jax
import jax.numpy as jnp

from fp4jax.kernels.choice import chosen
from fp4jax.kernels.log import once
from fp4jax.kernels.quantize import Output, Written
from fp4jax.kernels.scaled_matmul.backends import MOSAIC, XLA
from fp4jax.kernels.scaled_matmul.reference import Side

Implementation = Literal["mosaic", "xla"]
_say = once(__name__, "scaled_matmul runs in XLA: %s.")


def scaled_matmul(
    packed: Written,
    other: jax.Array,
    *,
    axis: int,
    side: Side = "lhs",
    factors: Sequence[jax.Array] = (),
    dtype: jax.typing.DTypeLike = jnp.bfloat16,
    implementation: Implementation | None = None,
) -> jax.Array:
    """Multiplies by an operand that is kept as codes and block scales.

    y = sum_c a[m, c] b[c, n] factors,  a = bfloat16(decode(codes) scales)

    Of the other operand either axis may be contracted, and of the packed one that along
    which its blocks lie. Every implementation decodes the same bits; sums are float32,
    in an order of their own.

    Args:
      packed: [c, m] or [m, c], contracted along `packed.axis`, of codes and scales; its
        gradient is not taken.
      other: bfloat16 [c, n] or [n, c].
      axis: which of its axes is contracted, not negative.
      side: "lhs" gives [m, n], "rhs" [n, m].
      factors: float32 [], which multiply the sums, one after the other.
      dtype: of the result.
      implementation: "mosaic", a Pallas kernel for NVIDIA GPUs of compute capability
        9, which decodes in registers, or "xla", which decodes to memory, for every
        device; None: what `KERNELS` has where it can, by default "xla".

    Returns:
      [m, n] of `dtype`, or [n, m].

    Raises:
      NotImplementedError: the implementation that is named cannot do this call here.
      ValueError: an implementation or a side that is none.
      TypeError: a packed operand that is none.
    """
    if implementation not in (None, *get_args(Implementation)):
        raise ValueError(
            "scaled_matmul: implementation must be one of "
            f"{', '.join(get_args(Implementation))} or None, got "
            f"implementation={implementation!r}."
        )
    if side not in get_args(Side):
        raise ValueError(
            f"scaled_matmul: side must be 'lhs' or 'rhs', got side={side!r}."
        )
    if not isinstance(packed, Written) or Output.CODES not in packed.quantized.arrays:
        raise TypeError(
            "scaled_matmul: packed must be Written with codes and scales, got "
            f"{type(packed).__name__}. The product of an array is lax.dot_general's."
        )
    backend = {"mosaic": MOSAIC, "xla": XLA}.get(
        implementation or "", chosen().scaled_matmul or XLA
    )
    why = backend.why_not(packed, other, axis=axis, dtype=dtype)
    if why is not None and implementation is not None:
        raise NotImplementedError(
            f"scaled_matmul: implementation={implementation!r} cannot do this: {why}. "
            "Use implementation='xla', or None to let the call choose."
        )
    if why is not None:
        _say(why)
        backend = XLA
    return backend.multiply(
        packed, other, axis=axis, side=side, factors=tuple(factors), dtype=dtype
    )
