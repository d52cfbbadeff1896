"""What a training step takes of its devices, read from the program alone.

No array is made: the step is compiled for as many virtual devices of a CPU.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.extend
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from experiments import presets
from experiments.collectives import Collective, collectives
from experiments.presets import ExperimentConfig
from fp4jax import sharding, train
from fp4jax.kernels.choice import KERNELS, chosen
from fp4jax.models import Transformer
from fp4jax.nnx import set_step
from fp4jax.train import TrainState
from fp4jax.train.losses import token_losses
from fp4jax.train.partition import partitioning

Abstract = dict[str, jax.ShapeDtypeStruct]

# The integers of a batch: of rows that are one document each, and of packed ones.
WHOLE = "inputs", "targets"
PACKED = *WHOLE, "segment_ids", "positions"


class Footprint(NamedTuple):
    """What a step takes of each device, in bytes.

    Attributes:
      params, optimizer: of what it keeps.
      residuals: what the forward pass leaves to the backward pass.
      peak: of the program of a CPU, whose products have operands in float32.
      collectives: what the devices send.
    """

    params: int
    optimizer: int
    residuals: int
    peak: int
    collectives: tuple[Collective, ...]

    @property
    def least(self) -> int:
        """What is there at once in any program: all of these, and the gradients."""
        return 2 * self.params + self.optimizer + self.residuals


def measure(
    config: ExperimentConfig, *, mesh: Mesh, integers: Sequence[str] = PACKED
) -> tuple[Footprint, Transformer]:
    """Returns what a step takes, and the model that it was compiled for, of shapes.

    Args:
      config: its first policy counts.
      mesh: of as many devices as the run is to have.
      integers: of a batch; with segment_ids, attention takes a mask.
    """
    policy = presets.schedule(config, config.policies[0])
    optimizer = train.make_optimizer(config.optim, steps=config.run.steps)

    def make_model() -> Transformer:
        return Transformer(config.model, policy, rngs=nnx.Rngs(0))

    def make_state() -> TrainState:
        return train.make_state(make_model(), optimizer.transform)[1]

    model = nnx.eval_shape(make_model)
    graph = nnx.graphdef(model)
    state = placed(jax.eval_shape(make_state), mesh)
    parts = config.run.microbatches
    step = train.make_train_step(graph, optimizer, microbatches=parts, mesh=mesh)
    shapes = functools.partial(batch, mesh=mesh, integers=integers)
    experts = config.model.moe
    exchange = _Balanced(experts.capacity_factor if experts else 0)
    with KERNELS(dataclasses.replace(chosen(), exchange=exchange)):
        program = step.lower(state, shapes(config)).compile()
    part = config.data.batch_size // parts
    data = dataclasses.replace(config.data, batch_size=part)
    of_part = shapes(dataclasses.replace(config, data=data))
    footprint = Footprint(
        params=_bytes(state.params),
        optimizer=_bytes(state.opt_state),
        residuals=_residuals(graph, state, of_part, mesh),
        peak=peak_bytes(program),
        collectives=tuple(collectives(program.as_text() or "")),
    )
    return footprint, model


@dataclasses.dataclass(frozen=True)
class _Balanced:
    """Sends to each device as many tiles, in programs that are not run.

    A GPU sends what is needed, and a CPU has no collective for it.

    Attributes:
      factor: of the room over an equal share; 0: room for all.
    """

    factor: float

    def exchange(
        self, x: jax.Array, sent: jax.Array, received: jax.Array, *, axis: str
    ) -> jax.Array:
        del sent, received
        parts = lax.axis_size(axis)
        room = x.shape[0] // parts
        share = math.ceil(room / (self.factor or parts))
        x = x.reshape(parts, room, *x.shape[1:])[:, :share]
        y = lax.all_to_all(x, axis, 0, 0, tiled=True)
        beyond = ((0, 0), (0, room - share), *((0, 0),) * (y.ndim - 2))
        return jnp.pad(y, beyond).reshape(-1, *y.shape[2:])


def _residuals(
    graph: nnx.GraphDef, state: TrainState, part: Abstract, mesh: Mesh
) -> int:
    """Returns the bytes that a forward pass leaves to its backward pass."""

    def forward(state: TrainState, batch: train.Batch) -> list[jax.Array]:
        def loss(params: Any) -> jax.Array:
            model = nnx.merge(graph, params, state.held, state.rest, copy=True)
            set_step(model, state.step)
            return token_losses(model, batch)[0]

        return jax.tree.leaves(jax.vjp(loss, state.params)[1])

    arguments = state, part
    with jax.set_mesh(mesh):
        traced = jax.make_jaxpr(forward)(*arguments)
        # Parameters are saved as well, but they are there anyway.
        given = set(traced.jaxpr.invars)
        saved = [x for x in traced.jaxpr.outvars if x not in given]
        pruned = traced.replace(jaxpr=traced.jaxpr.replace(outvars=saved))
        program = jax.jit(jax.extend.core.jaxpr_as_fun(pruned))
        compiled = program.lower(*jax.tree.leaves(arguments)).compile()
    return _memory(compiled).output_size_in_bytes


def peak_bytes(program: jax.stages.Compiled) -> int:
    """Returns what a device must have while it runs a program, arguments included."""
    memory = _memory(program)
    return (
        memory.argument_size_in_bytes
        + memory.temp_size_in_bytes
        + memory.output_size_in_bytes
        - memory.alias_size_in_bytes
    )


def _memory(program: jax.stages.Compiled) -> Any:
    found = program.memory_analysis()
    assert found is not None  # on every backend of ours
    return found


def placed(state: TrainState, mesh: Mesh) -> TrainState:
    """Returns the shapes of a state with the shardings that its arrays have."""

    def place(layout: P, tree: Any) -> Any:
        sharding = NamedSharding(mesh, layout)
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), tree
        )

    is_layout = lambda x: isinstance(x, P)
    return jax.tree.map(place, partitioning(state), state, is_leaf=is_layout)


def batch(config: ExperimentConfig, *, mesh: Mesh, integers: Sequence[str]) -> Abstract:
    """Returns the shapes of a batch."""
    array = functools.partial(
        jax.ShapeDtypeStruct,
        (config.data.batch_size, config.data.sequence_length),
        sharding=NamedSharding(mesh, sharding.spec("batch", None)),
    )
    return {
        **{name: array(jnp.int32) for name in integers},
        "loss_mask": array(jnp.float32),
    }


def _bytes(tree: Any) -> int:
    """Returns the bytes that a device has of the arrays of a tree."""
    return sum(
        math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize
        for x in jax.tree.leaves(tree)
    )
