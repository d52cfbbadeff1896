"""The differentiation of a quantized product: what is saved, and what comes back."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from fp4jax.numerics.groups import Groups
from fp4jax.ops.arguments import check_drawn
from fp4jax.ops.gemms import Amaxes, Gemms
from fp4jax.ops.grouped_gemms import GroupedGemms
from fp4jax.ops.held import AMAX, sample
from fp4jax.ops.noise import Noise
from fp4jax.ops.residuals import PackedOperand, PackedWeight


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def fp4_dot(
    gemms: Gemms,
    lhs: jax.Array,
    rhs: jax.Array,
    noise: Noise,
    held: jax.Array | None,
    step: jax.Array | None,
    packed: PackedOperand | None,
    packed_w: PackedWeight | None,
    groups: Groups | None = None,
) -> jax.Array:
    """Computes a product on canonical operands; programs name it so."""
    del step, packed  # a pass that is not differentiated samples nothing, saves nothing
    gemms = _with_groups(gemms, groups)
    amaxes = _amaxes(gemms, lhs, rhs, held, None, packed_w)
    lhs, rhs = gemms.prepared(lhs, _fprop_w(rhs, packed_w), noise)
    return gemms.forward(lhs, rhs, noise, amaxes)


def _fp4_dot_fwd(gemms: Gemms, lhs, rhs, noise, held, step, packed, packed_w, groups):
    gemms = _with_groups(gemms, groups)
    check_drawn(gemms.recipe, noise.key, gemms.caller, why="to differentiate")
    lhs, rhs = (_first_order_only(gemms.caller, x) for x in (lhs, rhs))
    amaxes = _amaxes(gemms, lhs, rhs, held, step, packed_w)
    prepared = gemms.prepared(lhs, _fprop_w(rhs, packed_w), noise)
    y = gemms.forward(*prepared, noise, amaxes)
    x, w = (lhs, rhs) if gemms.x_position == "lhs" else (rhs, lhs)
    if gemms.recipe.residuals == "packed":
        x = gemms.pack(x, noise, amaxes) if packed is None else packed
    if packed_w is not None:
        w = _dgrad_w(gemms, w, packed_w)
    operands = (x, w) if gemms.x_position == "lhs" else (w, x)
    lhs, rhs = gemms.saved(operands, prepared)
    return y, (lhs, rhs, noise, held, step, amaxes, groups)


def _fp4_dot_bwd(gemms: Gemms, residuals, g: jax.Array):
    lhs, rhs, noise, held, step, (x_amax, w_amax, _), groups = residuals
    gemms = _with_groups(gemms, groups)
    once = functools.partial(_first_order_only, gemms.caller)
    g = once(g)
    lhs, rhs = (x if isinstance(x, PackedOperand) else once(x) for x in (lhs, rhs))
    dy_amax = _amax(gemms, 2, g, held, step)
    amaxes = (x_amax, w_amax, dy_amax)
    dlhs, drhs = gemms.backward(lhs, rhs, g, noise, amaxes)
    return dlhs, drhs, None, _new_state(held, amaxes), None, None, None, None


fp4_dot.defvjp(_fp4_dot_fwd, _fp4_dot_bwd)


def pack_weight(
    gemms: Gemms,
    w: jax.Array,
    noise: Noise,
    held: jax.Array | None,
    step: jax.Array | None,
) -> PackedWeight:
    """Returns what the calls of one w have in common, of which no gradient is taken."""
    if held is not None:
        held = _float32(held)  # at which gradients can stop
    w, held = lax.stop_gradient((w, held))
    amax = _amax(gemms, 1, w, held, step)
    fprop, dgrad = gemms.pack_w(w, noise, (None, amax, None))
    return PackedWeight(fprop, dgrad, amax, shape=w.shape, dtype=w.dtype)


def _with_groups(gemms: Gemms, groups: Groups | None) -> Gemms:
    """Gives products of groups, whose place is data, what is not static about them."""
    if not isinstance(gemms, GroupedGemms):
        return gemms
    return dataclasses.replace(gemms, groups=groups)


def _fprop_w(w: jax.Array, packed: PackedWeight | None) -> jax.Array | PackedOperand:
    return w if packed is None or packed.fprop is None else packed.fprop


def _dgrad_w(
    gemms: Gemms, w: jax.Array, packed: PackedWeight
) -> jax.Array | PackedOperand:
    """Returns what the backward pass saves of w."""
    if packed.dgrad is not None:
        return packed.dgrad
    return _fprop_w(w, packed) if gemms.recipe.source == "fprop" else w


def _amaxes(
    gemms: Gemms,
    lhs: jax.Array,
    rhs: jax.Array,
    held: jax.Array | None,
    step: jax.Array | None,
    packed_w: PackedWeight | None,
) -> Amaxes:
    """Returns the amaxes of x and of w that are held; that of dy comes later."""
    x, w = (lhs, rhs) if gemms.x_position == "lhs" else (rhs, lhs)
    x_amax = _amax(gemms, 0, x, held, step)
    if packed_w is not None:
        return x_amax, packed_w.amax, None
    return x_amax, _amax(gemms, 1, w, held, step), None


def _amax(
    gemms: Gemms,
    operand: int,
    x: jax.Array,
    held: jax.Array | None,
    step: jax.Array | None,
) -> jax.Array | None:
    every = gemms.recipe.every[operand]
    if held is None or every is None:
        return None
    groups = gemms.groups if isinstance(gemms, GroupedGemms) and operand != 1 else None
    of_operand = _float32(held)[..., operand]
    amax = sample(x, of_operand, every=every, step=step, groups=groups)
    return checkpoint_name(amax, AMAX)


def _new_state(held: jax.Array | None, amaxes: Amaxes) -> jax.Array | None:
    """Returns the cotangent of `held`: what it becomes."""
    if held is None:
        return None
    old = _float32(held)
    new = (old[..., i] if a is None else a for i, a in enumerate(amaxes))
    new = jnp.stack([*new], axis=-1)
    new = jnp.where(jnp.isfinite(new), new, old)
    return lax.convert_element_type(new, held.dtype)


def _float32(held: jax.Array) -> jax.Array:
    return lax.convert_element_type(held, jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _first_order_only(caller: str, x: jax.Array) -> jax.Array:
    del caller
    return x


def _no_second_order(caller: str, *_):
    raise NotImplementedError(
        f"{caller}: the derivative must be of first order, got a second derivative "
        "through a quantized GEMM, which is not defined. Use recipe=None for it."
    )


_first_order_only.defvjp(_no_second_order, _no_second_order)
