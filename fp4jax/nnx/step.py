"""The step that noise depends on, and the errors that keep it from repeating."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from fp4jax.nnx.gemm import Gemm
from fp4jax.nnx.inject import layers

# Where an attention layer keeps what it hands to the linear layers inside it.
_HANDED_ON = ("qkv_dot_general", "out_dot_general")


def set_step(
    model: nnx.Module,
    step: jax.Array | int,
    *,
    microbatch: jax.Array | int | None = None,
) -> None:
    """Writes the training step into every quantized layer of a model.

    Call it in every step, inside the compiled function, before the forward pass. Under
    plain `jax.jit` that is on a model made there by
    `nnx.merge(graph, state, copy=True)`.

    Args:
      model: any module; stacked layers get one copy of the step each.
      step: integer scalar; inside a compiled function one of its arguments, or computed
        from them.
      microbatch: integer scalar i, where the model is called on the i-th of equal parts
        of the rows of the step's batch, so that they get the random bits which they
        have in the whole. Layers must see the rows as the first free dimension of x,
        and each part be whole blocks of tokens. None: the whole batch.

    Raises:
      ValueError: noise would repeat: `step` is a constant of the compiled function, one
        `DotGeneral` serves several layers, or the layers of a stack share a key.
      TypeError: `step` or `microbatch` is no integer scalar.
    """
    _check_integer("step", step)
    _check_argument(step)
    if microbatch is not None:
        _check_integer("microbatch", microbatch)
    _check_owners(model)
    _check_stacks(model)
    for _, node in nnx.iter_graph(model):
        if isinstance(node, Gemm):
            shape = node.key.get_value().shape
            fill = lambda value, shape=shape: jnp.broadcast_to(jnp.int32(value), shape)
            node.weight.set_value(None)  # made of the weights of another step
            node.step.set_value(fill(step))
            node.microbatch.set_value(None if microbatch is None else fill(microbatch))


def clear_step(model: nnx.Module) -> None:
    """Takes back what `set_step` wrote."""
    for _, node in nnx.iter_graph(model):
        if isinstance(node, Gemm):
            node.step.set_value(None)
            node.microbatch.set_value(None)
            node.weight.set_value(None)


def is_compiling() -> bool:
    """Returns whether the caller is being traced into a program."""
    return isinstance(jnp.zeros(()), jax.core.Tracer)


def _check_integer(name: str, value: Any) -> None:
    shape, dtype = jnp.shape(value), jnp.result_type(value)
    if shape or not jnp.issubdtype(dtype, jnp.integer):
        raise TypeError(
            f"set_step: {name} must be an integer scalar, got {name}={value!r} "
            f"(shape={shape}, dtype={dtype})."
        )


def _check_argument(step: Any) -> None:
    if is_compiling() and not isinstance(step, jax.core.Tracer):
        raise ValueError(
            "set_step: step must be an argument of the compiled function, or every "
            f"call of it draws the same noise, got the constant step={step!r}. Pass "
            "the step to the function that jax.jit or nnx.jit compiles."
        )


def _check_owners(model: nnx.Module) -> None:
    """Raises where several layers call one object whose recipe draws."""

    def draws(_, node):
        return isinstance(node, Gemm) and node.recipe.draws()

    for paths in nnx.find_duplicates(model, only=draws):
        owners = [path[:-1] for path in paths if path[-1] not in _HANDED_ON]
        if len(owners) > 1:
            names = ", ".join("/".join(map(str, path)) for path in owners)
            raise ValueError(
                "set_step: every layer must have a DotGeneral of its own, or they draw "
                f"the same noise, got one for {names}. Make one each, or leave that to "
                "fp4jax.nnx.quantize_model."
            )


def _check_stacks(model: nnx.Module) -> None:
    """Raises where a stack of layers has not one key for each."""
    for layer in layers(model):
        if layer.gemm is None or not layer.gemm.recipe.draws():
            continue
        keys = layer.gemm.key.get_value().shape
        if keys != layer.stack:
            raise ValueError(
                "set_step: stacked layers must have a key each, or they draw the same "
                f"noise, got keys of shape {keys} at {layer.path!r}, a stack of shape "
                f"{layer.stack}. Make it with DotGeneral(..., stack={layer.stack})."
            )
