"""All that a training step reads and writes, as one pytree."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh

from fp4jax.nnx import Held
from fp4jax.sharding import Compiled
from fp4jax.train.partition import spread


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainState:
    """The arrays of a run; with the model's graph they are the whole run.

    Attributes:
      step: int32 [], the number of steps taken.
      params: the trained parameters.
      opt_state: the optimizer's.
      held: the amaxes that tensor scales hold, which the backward pass writes.
      rest: every other variable of the model, such as the keys of its noise.
      skipped: int32 [], the number of steps whose update was skipped, as their loss or
        gradient was not finite.
      skipped_in_row: int32 [], how many of these were the newest steps.
    """

    step: jax.Array
    params: optax.Params
    opt_state: optax.OptState
    held: nnx.State
    rest: nnx.State
    skipped: jax.Array
    skipped_in_row: jax.Array

    def model(self, graph: nnx.GraphDef) -> Any:
        """Returns the model of a graph from `make_state`; its changes stay in it."""
        return nnx.merge(graph, self.params, self.held, self.rest, copy=True)


def make_state(
    model: nnx.Module, transform: optax.GradientTransformation
) -> tuple[nnx.GraphDef, TrainState]:
    """Returns the static graph of `model`, and the state of a run before its step 0.

    Args:
      model: its arrays become the state's, which a training step consumes; only its
        structure is of use from then on.
      transform: initializes `opt_state`.
    """
    graph, params, held, rest = nnx.split(model, nnx.Param, Held, ...)
    state = TrainState(
        step=jnp.zeros((), jnp.int32),
        params=params,
        opt_state=transform.init(params),
        held=held,
        rest=rest,
        skipped=jnp.zeros((), jnp.int32),
        skipped_in_row=jnp.zeros((), jnp.int32),
    )
    return graph, state


def init_state(
    make_model: Callable[[], nnx.Module],
    transform: optax.GradientTransformation,
    *,
    mesh: Mesh | None,
) -> TrainState:
    """Returns the state of a run before its step 0, spread over a mesh.

    Args:
      make_model: returns the model of `make_state`; on a mesh while it is traced, so
        that each device makes its own part only.
      transform: initializes `opt_state`.
      mesh: None is one device.
    """

    def make() -> TrainState:
        return spread(make_state(make_model(), transform)[1])

    return make() if mesh is None else Compiled(jax.jit(make), mesh)()
