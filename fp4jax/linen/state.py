"""Held amaxes of Linen layers, which leave a training step through its gradient."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax.linen.fp8_ops import OVERWRITE_WITH_GRADIENT, fp32_max_grad
from jax import lax

Variables = Mapping[str, Any]


def value_and_grad(
    loss_fn: Callable[..., Any], *, has_aux: bool = False
) -> Callable[..., tuple[Any, Any, dict[str, Any]]]:
    """Returns a function that computes a loss, its gradients, and the new state.

    Gradients are those of the parameters alone, so an optimizer, its weight decay and
    its clipping never see the state of held scales. A loop that skips an update should
    keep the old variables too.

    Args:
      loss_fn: of the variables {"params": ..., ...}, and of further arguments.
      has_aux: whether it returns auxiliary data beside the loss.

    Returns:
      A function of the same arguments that returns what `loss_fn` does, the gradients
      of variables["params"], and the variables with their new state. It runs under
      `jax.jit`.

    Raises:
      ValueError: a model with held scales, not under `jax.jit`.

    Example:
      >>> import jax, jax.numpy as jnp, optax
      >>> from flax import linen as nn
      >>> from fp4jax import linen, recipes
      >>> model = linen.quantize(nn.Dense(8), recipes.ue5m3(every=50))
      >>> x, key = jnp.ones((4, 32)), jax.random.key(0)
      >>> variables = jax.jit(model.init)(key, x)
      >>> loss_fn = lambda v, key: model.apply(v, x, rngs={"quant": key}).sum()
      >>> step = jax.jit(linen.value_and_grad(loss_fn))
      >>> loss, grads, variables = step(variables, key)
      >>> jax.tree.map(jnp.shape, grads)
      {'bias': (8,), 'kernel': (32, 8)}
      >>> int(variables["_overwrite_with_gradient"]["DotGeneral_0"]["step"])
      1
    """

    def wrapped(variables: Variables, *args, **kwargs):
        names = {"params", OVERWRITE_WITH_GRADIENT} & variables.keys()
        rest = {name: variables[name] for name in variables.keys() - names}

        def loss(chosen):
            return loss_fn(rest | combine_by_max(chosen), *args, **kwargs)

        chosen = {name: variables[name] for name in names}
        value, grads = jax.value_and_grad(loss, has_aux=has_aux)(chosen)
        params = grads.pop("params")
        return value, params, {**variables, **grads}

    return wrapped


def combine_by_max(variables: Variables) -> dict[str, Any]:
    """Makes the uses of one held amax combine by their maximum.

    The state of held scales is the collection "_overwrite_with_gradient", whose
    gradient is its next value, as Flax has it; Flax's `TrainState` writes it back. For
    each layer it holds the amaxes of x, w and dy, and the number of steps that have
    used it, on which sampling depends. Autodiff would add what the uses of a layer have
    to say, so call this inside the differentiated function, on the variables of which
    the gradient is taken, under `jax.jit`. A layer that is not used then keeps its
    state. Models made by `quantize` do so in `apply`.

    Args:
      variables: {"params": ..., "_overwrite_with_gradient": ...} and others.

    Returns:
      The variables, with that collection in Flax's dtype whose sums are maxima.

    Raises:
      ValueError: differentiated, but not under `jax.jit`, where that dtype has no sum.
    """
    state = variables.get(OVERWRITE_WITH_GRADIENT, {})
    if any(leaf.dtype == fp32_max_grad for leaf in jax.tree.leaves(state)):
        return dict(variables)
    return (
        {**variables, OVERWRITE_WITH_GRADIENT: _by_max(state)}
        if state
        else {**variables}
    )


def as_floats(tree: Any) -> Any:
    """Returns a tree with its state in float32 again."""
    is_state = lambda x: getattr(x, "dtype", None) == fp32_max_grad
    return jax.tree.map(lambda x: _float(x) if is_state(x) else x, tree)


def _float(x: jax.Array) -> jax.Array:
    return lax.convert_element_type(x, jnp.float32)


@jax.custom_vjp
def _by_max(state: Any) -> Any:
    return jax.tree.map(lambda x: lax.convert_element_type(x, fp32_max_grad), state)


def _by_max_fwd(state: Any):
    if not all(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(state)):
        raise ValueError(
            "combine_by_max: the gradient of held scales must be taken under jax.jit, "
            "got arrays. Compile the training step."
        )
    return _by_max(state), state


def _by_max_bwd(state: Any, new: Any):
    # The zero of the dtype, where nothing is used, is minus infinity.
    keep = lambda old, new: jnp.where(jnp.isfinite(_float(new)), _float(new), old)
    return (jax.tree.map(keep, state, new),)


_by_max.defvjp(_by_max_fwd, _by_max_bwd)


@jax.custom_vjp
def advance(y: jax.Array, step: jax.Array) -> jax.Array:
    """Returns y; the cotangent of the step, which counts uses, is the next step."""
    return y


def _advance_fwd(y: jax.Array, step: jax.Array):
    return y, step


def _advance_bwd(step: jax.Array, g: jax.Array):
    return g, lax.convert_element_type(_float(step) + 1, step.dtype)


advance.defvjp(_advance_fwd, _advance_bwd)


@jax.custom_vjp
def whole(step: jax.Array) -> jax.Array:
    """Returns a step as an integer."""
    return _float(step).astype(jnp.int32)


def _whole_fwd(step: jax.Array):
    return whole(step), step


def _whole_bwd(step: jax.Array, _):
    # What it combines with is the next step: by maximum with less, in a sum with zero.
    return (step if step.dtype == fp32_max_grad else jnp.zeros_like(step),)


whole.defvjp(_whole_fwd, _whole_bwd)
