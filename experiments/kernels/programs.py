"""Training steps, traced ahead, compiled and timed."""

import dataclasses
import math
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax.sharding import Mesh

from experiments import footprint
from experiments.kernels.cases import Case
from experiments.presets import ExperimentConfig
from fp4jax import sharding, train
from fp4jax.nnx import layers
from fp4jax.train import TrainState
from fp4jax.train.losses import Batch
from fp4jax.train.partition import spread

_BLOCK_SECONDS = 1.5  # of steps that are timed together
_BLOCKS = 2
_MAX_STEPS = 20


class Lowered(NamedTuple):
    """A case before it is compiled.

    Attributes:
      init: returns the state before step 0.
      step: what `make_train_step` compiles.
      holds: whether some layer holds amaxes, so that steps differ in what they cost.
    """

    init: jax.stages.Lowered
    step: jax.stages.Lowered
    holds: bool


def lower(
    case: Case, config: ExperimentConfig, batch: Batch, *, mesh: Mesh | None = None
) -> Lowered:
    """Returns the programs of a case.

    Args:
      case: the model.
      config: optimizer and microbatches.
      batch: arrays, or their shapes.
      mesh: over which all is spread; None for one device.
    """
    optimizer = train.make_optimizer(config.optim, steps=config.run.steps)

    def make() -> TrainState:
        return spread(train.make_state(case.make_model(), optimizer.transform)[1])

    with case.tracing():
        model = nnx.eval_shape(case.make_model)
        init = sharding.Compiled(jax.jit(make), mesh)
        state = jax.eval_shape(make)
        if mesh is not None:
            state = footprint.placed(state, mesh)
        step = train.make_train_step(
            nnx.graphdef(model),
            optimizer,
            microbatches=config.run.microbatches,
            mesh=mesh,
        )
        holds = any(
            layer.gemm is not None and layer.gemm.recipe.holds
            for layer in layers(model)
        )
        return Lowered(init.lower(), step.lower(state, batch), holds)


def measure(lowered: Lowered, batches: Sequence[Batch]) -> dict[str, Any]:
    """Returns what a step takes: time, memory, and how the training goes.

    Args:
      lowered: from `lower`; it is compiled here.
      batches: two or more, taken in turns.
    """
    start = time.perf_counter()
    init, step = lowered.init.compile(), lowered.step.compile()
    compile_seconds = time.perf_counter() - start
    state = init()
    state, metrics = step(state, batches[0])
    nonzero = nonzero_gradients(state)
    state, _, estimate = _timed(step, state, batches, 1)
    steps = max(1, min(_MAX_STEPS, round(_BLOCK_SECONDS / estimate)))
    blocks, first = [], float(metrics["loss"])
    for _ in range(_BLOCKS):
        state, metrics, seconds = _timed(step, state, batches, steps)
        blocks.append(1e3 * seconds)
    row = {"milliseconds": blocks, "steps": steps}
    if lowered.holds:
        row["sampled_milliseconds"] = []
        for _ in range(_BLOCKS):
            zero = jnp.zeros_like(state.step)
            state = dataclasses.replace(state, step=zero)
            state, metrics, seconds = _timed(step, state, batches, 1)
            row["sampled_milliseconds"].append(1e3 * seconds)
    return row | {
        "first_loss": first,
        "loss": float(metrics["loss"]),
        "skipped": int(state.skipped),
        "nonzero_gradients": nonzero,
        "program_bytes": footprint.peak_bytes(step),
        "device_bytes": device_bytes(),
        "compile_seconds": compile_seconds,
    }


def _timed(
    step: jax.stages.Compiled,
    state: TrainState,
    batches: Sequence[Batch],
    steps: int,
) -> tuple[TrainState, Any, float]:
    """Takes steps; returns the state, the last metrics and the seconds of a step."""
    jax.block_until_ready(state)
    metrics, start = None, time.perf_counter()
    for i in range(steps):
        state, metrics = step(state, batches[i % len(batches)])
    jax.block_until_ready((state, metrics))
    return state, metrics, (time.perf_counter() - start) / steps


def nonzero_gradients(state: TrainState) -> float:
    """Returns the share of elements of kernels whose first moment is not zero.

    After step 0 that is where the gradient was not.
    """
    moments = nnx.to_flat_state(optax.tree.get(state.opt_state, "mu"))
    kernels = [x.get_value() for path, x in moments if path[-1] == "kernel"]
    found = sum(float(jnp.count_nonzero(x)) for x in kernels)
    return found / sum(x.size for x in kernels)


def device_bytes() -> int | None:
    """Returns the most bytes that this process has had on its device, if known."""
    stats = jax.local_devices()[0].memory_stats()
    return None if stats is None else stats.get("peak_bytes_in_use")


def batches(
    config: ExperimentConfig, *, documents: int = 1, mesh: Mesh | None = None
) -> list[dict[str, jax.Array]]:
    """Returns two batches of random tokens.

    Args:
      config: the shape of a batch, and the vocabulary.
      documents: of equal length in each row; with one, batches do not tell any apart.
      mesh: over which rows are spread.
    """
    rows, length = config.data.batch_size, config.data.sequence_length
    places = jnp.broadcast_to(jnp.arange(length), (rows, length))
    size = math.ceil(length / documents)
    of_documents = {"segment_ids": places // size + 1, "positions": places % size}

    def batch(seed: int) -> dict[str, jax.Array]:
        tokens = jax.random.randint(
            jax.random.key(seed), (rows, length + 1), 0, config.model.vocab_size
        )
        arrays = {
            "inputs": tokens[:, :-1],
            "targets": tokens[:, 1:],
            "loss_mask": jnp.ones((rows, length), jnp.float32),
            **(of_documents if documents > 1 else {}),
        }
        return arrays if mesh is None else sharding.shard_rows(arrays, mesh)

    return [batch(seed) for seed in (0, 1)]
