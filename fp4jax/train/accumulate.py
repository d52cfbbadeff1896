"""The gradient of a batch, of all of it at once or as a sum over its microbatches."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from fp4jax.nnx import (
    Held,
    QuantizedWeight,
    quantize_weights,
    set_step,
    value_and_grad,
)
from fp4jax.sharding import constrain, num_shards
from fp4jax.train.losses import Batch, token_losses
from fp4jax.train.partition import spread
from fp4jax.train.state import TrainState


def accumulate(
    graph: nnx.GraphDef,
    state: TrainState,
    batch: Batch,
    *,
    microbatches: int,
) -> tuple[jax.Array, nnx.State, nnx.State]:
    """Returns the masked mean loss, its gradient, and the amaxes that are now held.

    loss = sum_i loss_i,  loss_i = sum over the tokens of part i of mask nats / weight,
    weight = max(1, sum over all tokens of mask)

    The weight comes before the parts, so that every dy is that of the whole batch.

    Args:
      graph: the model's.
      state: of the run.
      batch: [b, t] arrays.
      microbatches: number of parts; gradients are summed in float32.

    Raises:
      ValueError: b is not a multiple of `microbatches`, or its parts not of the
        devices.
    """
    weight = jnp.maximum(jnp.sum(batch["loss_mask"].astype(jnp.float32)), 1)

    def part(rows: Batch, index: Any, weights: nnx.State) -> tuple[Any, Any, Any]:
        model = nnx.merge(graph, state.params, state.held, state.rest, copy=True)
        set_step(model, state.step, microbatch=index)
        nnx.update(model, weights)
        loss, grads = value_and_grad(_share)(model, rows, weight)
        return loss, spread(grads), nnx.state(model, Held)

    if microbatches == 1:
        return part(batch, None, nnx.State({}))
    weights = _quantized_weights(graph, state)

    def add(sums: tuple[Any, Any, Any], x: tuple[jax.Array, Batch]):
        loss, grads, held = part(x[1], x[0], weights)
        added = jax.tree.map(jnp.add, sums[:2], (loss, grads))
        # Amaxes are not negative, and those of the whole are the largest of the parts.
        return (*added, jax.tree.map(jnp.maximum, sums[2], held)), None

    zeros = jax.tree.map(
        lambda x: jnp.zeros(x.shape, jnp.float32), (weight, state.params, state.held)
    )
    zeros = spread(zeros)
    parts = jax.tree.map(lambda x: _split(x, microbatches), dict(batch))
    return lax.scan(add, zeros, (jnp.arange(microbatches), parts))[0]


def _quantized_weights(graph: nnx.GraphDef, state: TrainState) -> nnx.State:
    """Returns what the microbatches have in common."""
    model = nnx.merge(graph, state.params, state.held, state.rest, copy=True)
    set_step(model, state.step)
    quantize_weights(model)
    return nnx.state(model, QuantizedWeight)


def _split(x: jax.Array, parts: int) -> jax.Array:
    """Returns [parts, b / parts, t] of [b, t], every part spread over the mesh."""
    devices = num_shards("batch")
    if x.shape[0] % (parts * devices):
        raise ValueError(
            "make_train_step: the rows of a batch must be a multiple of microbatches "
            f"and of devices, got {x.shape[0]} rows, microbatches={parts} and "
            f"{devices} devices."
        )
    x = jnp.reshape(x, (parts, x.shape[0] // parts, *x.shape[1:]))
    # Rows of one part lay together on few devices; left so, all would compute it.
    return constrain(x, None, "batch", None)


def _share(model: nnx.Module, batch: Batch, weight: jax.Array) -> jax.Array:
    """Returns what the rows contribute to the mean over a batch of some weight."""
    return token_losses(model, batch)[0] / weight
