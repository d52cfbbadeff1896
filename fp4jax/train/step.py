"""The jitted training and evaluation steps."""

import dataclasses
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from fp4jax.nnx import Held, set_step, value_and_grad
from fp4jax.train.optim import Optimizer
from fp4jax.train.state import TrainState

Batch = Mapping[str, jax.Array | np.ndarray]
Metrics = dict[str, jax.Array]

# XLA may skip the rounding of a bfloat16 value inside a fusion, and which it skips
# depends on how layers are scanned and rematerialized. With the option off, losses do
# not depend on it.
_COMPILER_OPTIONS = {"xla_allow_excess_precision": False}


def make_train_step(
    graph: nnx.GraphDef, optimizer: Optimizer
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
    """Returns the jitted `step(state, batch) -> (state, metrics)`; it consumes state.

    Args:
      graph: the model's, from `make_state`.
      optimizer: from `make_optimizer`.

    Returns:
      A function of a batch with `inputs`, `targets`, `segment_ids`, `positions` and
      `loss_mask`, all [b, t]. Its metrics are float32 scalars: the masked mean `loss`,
      the `grad_norm` before clipping, and the `lr` of the step.
    """

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        model = nnx.merge(graph, state.params, state.held, state.rest, copy=True)
        set_step(model, state.step)
        loss, grads = value_and_grad(_mean_loss)(model, batch)
        updates, opt_state = optimizer.transform.update(
            grads, state.opt_state, state.params
        )
        grad_norm = optax.tree.norm(grads)
        # A step that went wrong must not decide the scales of those to come.
        finite = jnp.isfinite(loss) & jnp.isfinite(grad_norm)
        held = jax.tree.map(
            lambda new, old: jnp.where(finite, new, old),
            nnx.state(model, Held),
            state.held,
        )
        metrics = {
            "loss": loss,
            "grad_norm": grad_norm,
            "lr": jnp.asarray(optimizer.schedule(state.step), jnp.float32),
        }
        state = dataclasses.replace(
            state,
            step=state.step + 1,
            params=optax.apply_updates(state.params, updates),
            opt_state=opt_state,
            held=held,
        )
        return state, metrics

    return jax.jit(step, donate_argnums=0, compiler_options=_COMPILER_OPTIONS)


def make_eval_step(graph: nnx.GraphDef) -> Callable[[TrainState, Batch], Metrics]:
    """Returns the jitted `step(state, batch) -> {"loss_sum": float32 [], in nats}`.

    The forward pass is that of training, quantized fprop included; held amaxes are
    read and never refreshed.
    """

    def step(state: TrainState, batch: Batch) -> Metrics:
        model = nnx.merge(graph, state.params, state.held, state.rest, copy=True)
        set_step(model, state.step)  # for recipes that draw in the forward pass
        loss_sum, _ = token_losses(model, batch)
        return {"loss_sum": loss_sum}

    return jax.jit(step, compiler_options=_COMPILER_OPTIONS)


def token_losses(model: nnx.Module, batch: Batch) -> tuple[jax.Array, jax.Array]:
    """Returns the cross entropy summed over the mask, in nats, and the mask's sum.

    loss_sum = sum_i mask_i (logsumexp(logits_i) - logits_i[target_i]),  all in float32
    """
    logits = model(
        batch["inputs"],
        segment_ids=batch["segment_ids"],
        positions=batch["positions"],
    )
    losses = optax.losses.softmax_cross_entropy_with_integer_labels(
        logits, batch["targets"]
    )
    mask = batch["loss_mask"].astype(jnp.float32)
    return jnp.sum(losses * mask), jnp.sum(mask)


def _mean_loss(model: nnx.Module, batch: Batch) -> jax.Array:
    total, weight = token_losses(model, batch)
    return total / jnp.maximum(weight, 1)
