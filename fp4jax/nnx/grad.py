"""Differentiation of a model whose layers hold the amaxes of their operands."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from flax.linen.fp8_ops import fp32_max_grad
from jax import lax

from fp4jax.nnx.gemm import Held
from fp4jax.nnx.step import clear_step, is_compiling


def value_and_grad(
    loss_fn: Callable[..., Any], *, has_aux: bool = False
) -> Callable[..., tuple[Any, nnx.State]]:
    """Returns `nnx.value_and_grad` of a loss, which also keeps held amaxes up to date.

    Where layers have a `Held` tensor scale, their new amaxes leave the backward pass as
    gradients and are written into the model; calls of one layer, and the lanes of a
    `vmap`, combine by maximum, and a layer that took no part keeps its amaxes.
    `nnx.value_and_grad` itself is right with such layers as well, and slower: it never
    writes an amax, and one that has not been seen is computed at every step.

    The step that `set_step` wrote serves one differentiation: another raises where
    noise would be drawn, until it is set again.

    Args:
      loss_fn: maps a model, and further arguments, to a scalar, or with `has_aux` to a
        pair of a scalar and anything.
      has_aux: as for `nnx.value_and_grad`.

    Returns:
      A function of the same arguments. It returns the value and the gradients with
      respect to `nnx.Param`. Where layers hold amaxes and nothing compiles the caller,
      it compiles itself, and its arguments must then be arrays.

    Example:
      >>> import fp4jax.nnx
      >>> from fp4jax import recipes
      >>> model = nnx.Linear(64, 32, rngs=nnx.Rngs(0))
      >>> fp4jax.nnx.quantize_model(model, recipes.ufp4(), rngs=nnx.Rngs(1))
      >>> loss_fn = lambda model, x: jnp.mean(model(x) ** 2)
      >>> fp4jax.nnx.set_step(model, 0)
      >>> value_and_grad = nnx.jit(fp4jax.nnx.value_and_grad(loss_fn))
      >>> loss, grads = value_and_grad(model, jnp.ones((8, 64)))
      >>> grads["kernel"].shape
      (64, 32)
    """
    plain = nnx.value_and_grad(loss_fn, has_aux=has_aux)
    holding = functools.partial(_value_and_grad, loss_fn, has_aux)
    compiled = nnx.jit(holding)

    @functools.wraps(loss_fn)
    def wrapped(model: nnx.Module, *args, **kwargs):
        if not jax.tree.leaves(nnx.state(model, Held)):
            found = plain(model, *args, **kwargs)
        elif is_compiling():
            found = holding(model, *args, **kwargs)
        else:  # arrays of the dtype that adds by maximum exist in programs only
            found = compiled(model, *args, **kwargs)
        clear_step(model)
        return found

    return wrapped


def _value_and_grad(loss_fn: Callable, has_aux: bool, model: nnx.Module, *args, **kw):
    held = nnx.as_pure(nnx.state(model, Held))  # arrays; variables will change below
    to_max = lambda amax: lax.convert_element_type(amax, fp32_max_grad)
    nnx.update(model, jax.tree.map(to_max, held))
    found, grads = nnx.value_and_grad(
        loss_fn,
        argnums=nnx.DiffState(0, nnx.Any(nnx.Param, Held)),
        has_aux=has_aux,
        allow_int=True,  # which a dtype of its own counts as
    )(model, *args, **kw)
    grads, new = nnx.split_state(grads, nnx.Param, Held)
    nnx.update(model, jax.tree.map(_refreshed, held, nnx.as_pure(new)))
    return found, grads


def _refreshed(old: jax.Array, new: jax.Array) -> jax.Array:
    """Returns the new amaxes; the old ones of a layer that took no part: -inf."""
    new = lax.convert_element_type(new, jnp.float32)
    return jnp.where(new >= 0, new, old)
