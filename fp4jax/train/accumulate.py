"""The gradient of a batch, of all of it at once or as a sum over its microbatches."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from fp4jax.models import Transformer, moe
from fp4jax.models.moe import Balances
from fp4jax.nnx import (
    Gemm,
    Held,
    QuantizedWeight,
    quantize_weights,
    set_step,
    value_and_grad,
)
from fp4jax.ops.held import under_one_condition
from fp4jax.sharding import constrain, num_shards
from fp4jax.train.losses import Batch, cross_entropies, inputs_of
from fp4jax.train.partition import spread
from fp4jax.train.state import TrainState


class Gradient(NamedTuple):
    """What a batch gives.

    Attributes:
      loss: float32 [], the masked mean.
      grads: the gradient of the loss, and of what balances the experts.
      held: the amaxes that are now held.
      balances: for each of the model's stacks how its experts were used, or None.
    """

    loss: jax.Array
    grads: nnx.State
    held: nnx.State
    balances: Balances


def accumulate(
    graph: nnx.GraphDef,
    state: TrainState,
    batch: Batch,
    *,
    microbatches: int,
) -> Gradient:
    """Returns the masked mean loss, its gradient, and the amaxes that are now held.

    loss = sum_i loss_i,  loss_i = sum over the tokens of part i of mask nats / weight,
    weight = max(1, sum over all tokens of mask)

    The weight comes before the parts, so that every dy is that of the whole batch. The
    auxiliary loss of experts is the mean of those of the parts, their loads are summed.

    Args:
      graph: the model's.
      state: of the run.
      batch: [b, t] arrays, of rows that pass `check_rows`.
      microbatches: number of parts; gradients are summed in float32.
    """
    gradient = functools.partial(
        _gradient, graph, state, batch, microbatches=microbatches
    )
    model = state.model(graph)
    gemms = (node for _, node in nnx.iter_graph(model) if isinstance(node, Gemm))
    due = [each for gemm in gemms for each in gemm.due(state.step)]
    if not due:
        return gradient()
    return under_one_condition(jnp.stack(due), gradient)


def _gradient(
    graph: nnx.GraphDef, state: TrainState, batch: Batch, *, microbatches: int
) -> Gradient:
    """Returns what `accumulate` does, which decides what may be sampled."""
    weight = jnp.maximum(jnp.sum(batch["loss_mask"].astype(jnp.float32)), 1)

    def share(model: Transformer, rows: Batch) -> tuple[jax.Array, Any]:
        output = model.forward(**inputs_of(rows))
        loss = jnp.sum(cross_entropies(output.logits, rows)) / weight
        balances = tuple(
            balance and balance._replace(aux_loss=balance.aux_loss / microbatches)
            for balance in output.balances
        )
        return loss + moe.aux_loss(balances), (loss, balances)

    def part(rows: Batch, index: Any, weights: nnx.State) -> Gradient:
        model = state.model(graph)
        set_step(model, state.step, microbatch=index)
        nnx.update(model, weights)
        found, grads = value_and_grad(share, has_aux=True)(model, rows)
        _, (loss, balances) = found
        return Gradient(loss, spread(grads), nnx.state(model, Held), balances)

    if microbatches == 1:
        return part(batch, None, nnx.State({}))
    weights = _quantized_weights(graph, state)

    def add(sums: Gradient, x: tuple[jax.Array, Batch]):
        found = part(x[1], x[0], weights)
        added = jax.tree.map(jnp.add, sums, found)
        # Amaxes are not negative, and those of the whole are the largest of the parts.
        held = jax.tree.map(jnp.maximum, sums.held, found.held)
        return added._replace(held=held), None

    parts = jax.tree.map(lambda x: _split(x, microbatches), dict(batch))
    loss, grads, held = jax.tree.map(
        lambda x: jnp.zeros(x.shape, jnp.float32), (weight, state.params, state.held)
    )
    balances = state.model(graph).no_balances()
    zeros = Gradient(loss, spread(grads), held, balances)
    return lax.scan(add, zeros, (jnp.arange(microbatches), parts))[0]


def _quantized_weights(graph: nnx.GraphDef, state: TrainState) -> nnx.State:
    """Returns what the microbatches have in common."""
    model = state.model(graph)
    set_step(model, state.step)
    quantize_weights(model)
    return nnx.state(model, QuantizedWeight)


def check_rows(rows: int, parts: int) -> None:
    """Raises ValueError unless parts and devices divide the rows of a batch."""
    devices = num_shards("batch")
    if rows == 0 or rows % (parts * devices):
        raise ValueError(
            "make_train_step: the rows of a batch must be a multiple of microbatches "
            f"and of devices along data, fsdp and expert, got rows={rows}, "
            f"microbatches={parts}, devices={devices}."
        )


def _split(x: jax.Array, parts: int) -> jax.Array:
    """Returns [parts, b / parts, t] of [b, t], every part spread over the mesh."""
    x = jnp.reshape(x, (parts, x.shape[0] // parts, *x.shape[1:]))
    # Rows of one part lay together on few devices; left so, all would compute it.
    return constrain(x, None, "batch", None)
