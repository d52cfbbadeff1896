"""Conditions on the arguments of a quantization, checked when it is traced."""

import jax
import jax.numpy as jnp

from fp4jax.numerics import checks
from fp4jax.numerics.groups import Groups
from fp4jax.numerics.quantizer import Quantizer


def check(
    x: jax.Array,
    quantizer: Quantizer,
    *,
    key: jax.Array | None,
    amax: jax.Array | None,
    groups: Groups | None = None,
) -> None:
    """Raises where an argument cannot be honoured."""
    checks.check_float(x, "quantize", name="x")
    if not isinstance(quantizer, Quantizer):
        raise TypeError(
            f"quantize: quantizer must be a Quantizer, got quantizer={quantizer!r}."
        )
    checks.check_key(key, "quantize")
    if quantizer.draws and key is None:
        raise ValueError(
            "quantize: key must be a PRNG key for a quantizer that draws random "
            f"numbers, got key=None (rounding={quantizer.rounding}, "
            f"rotation={quantizer.rotation})."
        )
    if amax is not None and quantizer.tensor_scale is None:
        raise ValueError(
            "quantize: amax must be None unless the quantizer has a tensor scale, got "
            f"amax={amax}."
        )
    shape = () if groups is None else (groups.count,)
    if amax is not None and jnp.shape(amax) != shape:
        expected = "a scalar" if groups is None else f"of shape {shape}"
        raise ValueError(
            f"quantize: amax must be {expected}, got shape={jnp.shape(amax)}."
        )


def checked_axes(
    x: jax.Array, quantizer: Quantizer, *, axis: int, other: int | None
) -> tuple[int, int | None]:
    """Returns the blocked axes, not negative; of a matrix, the other one by default."""
    axis = checks.checked_axis(x, axis, caller="quantize")
    if not quantizer.is_square:
        if other is not None:
            raise ValueError(
                "quantize: other must be None unless blocks are squares, got "
                f"other={other}, block={quantizer.block}."
            )
        return axis, None
    if other is None and x.ndim == 2:
        return axis, 1 - axis
    if other is None:
        raise ValueError(
            "quantize: other must name the second axis of square blocks, got "
            f"other=None (shape={x.shape}, block={quantizer.block})."
        )
    other = checks.checked_axis(x, other, caller="quantize", name="other")
    if other == axis:
        raise ValueError(
            f"quantize: other must differ from axis, got other={other}, axis={axis}."
        )
    return axis, other
