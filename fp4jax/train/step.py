"""The jitted training and evaluation steps."""

import dataclasses
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from fp4jax.nnx import set_step
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
        def loss_of(params):
            model = nnx.merge(graph, params, state.rest, copy=True)
            set_step(model, state.step)
            total, weight = token_losses(model, batch)
            return total / jnp.maximum(weight, 1)

        loss, grads = jax.value_and_grad(loss_of)(state.params)
        updates, opt_state = optimizer.transform.update(
            grads, state.opt_state, state.params
        )
        metrics = {
            "loss": loss,
            "grad_norm": optax.tree.norm(grads),
            "lr": jnp.asarray(optimizer.schedule(state.step), jnp.float32),
        }
        state = dataclasses.replace(
            state,
            step=state.step + 1,
            params=optax.apply_updates(state.params, updates),
            opt_state=opt_state,
        )
        return state, metrics

    return jax.jit(step, donate_argnums=0, compiler_options=_COMPILER_OPTIONS)


def make_eval_step(graph: nnx.GraphDef) -> Callable[[TrainState, Batch], Metrics]:
    """Returns the jitted `step(state, batch) -> {"loss_sum": float32 [], in nats}`.

    The forward pass is that of training, quantized fprop included.
    """

    def step(state: TrainState, batch: Batch) -> Metrics:
        model = nnx.merge(graph, state.params, state.rest, copy=True)
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
