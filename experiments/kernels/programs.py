"""Training steps, traced ahead, compiled and timed."""

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
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
_MIN_STEPS, _MAX_STEPS = 2, 20


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


class Training:
    """A run of steps, whose state it keeps.

    Args:
      init: returns the state before step 0.
      step: takes a step.
      batches: two or more, taken in turns.
    """

    def __init__(
        self,
        init: jax.stages.Compiled,
        step: jax.stages.Compiled,
        batches: Sequence[Batch],
    ):
        self.state: TrainState = init()
        self.step, self._batches = step, batches

    @property
    def program(self) -> str:
        """The compiled program, as text."""
        return self.step.as_text() or ""

    def seconds(self, steps: int) -> tuple[float, float]:
        """Takes steps; returns the seconds of each, and the loss of the last."""
        jax.block_until_ready(self.state)
        metrics, start = {}, time.perf_counter()
        for i in range(steps):
            batch = self._batches[i % len(self._batches)]
            self.state, metrics = self.step(self.state, batch)
        jax.block_until_ready((self.state, metrics))
        seconds = (time.perf_counter() - start) / steps
        return seconds, float(metrics["loss"])

    def rewind(self) -> None:
        """Makes the next step one that takes new amaxes."""
        step = self.state.step * 0
        self.state = dataclasses.replace(self.state, step=step)


def compiled(lowered: Lowered, batches: Sequence[Batch]) -> Training:
    """Returns a run before its step 0."""
    return Training(lowered.init.compile(), lowered.step.compile(), batches)


def measure(
    lowered: Lowered,
    batches: Sequence[Batch],
    *,
    also: Callable[[Training], dict[str, Any]] = lambda training: {},
) -> dict[str, Any]:
    """Returns what a step takes: time, memory, and how the training goes.

    Args:
      lowered: from `lower`; it is compiled here.
      batches: two or more, taken in turns.
      also: measures more of the steps, once these have their times.
    """
    start = time.perf_counter()
    training = compiled(lowered, batches)
    compile_seconds = time.perf_counter() - start
    _, first_loss = training.seconds(1)
    nonzero = nonzero_gradients(training.state)
    estimate, _ = training.seconds(1)
    steps = max(_MIN_STEPS, min(_MAX_STEPS, round(_BLOCK_SECONDS / estimate)))
    blocks = [training.seconds(steps) for _ in range(_BLOCKS)]
    row: dict[str, Any] = {
        "milliseconds": [1e3 * seconds for seconds, _ in blocks],
        "steps": steps,
        "first_loss": first_loss,
        "loss": blocks[-1][1],
        "skipped": int(training.state.skipped),
        "nonzero_gradients": nonzero,
        "program_bytes": footprint.peak_bytes(training.step),
        "device_bytes": device_bytes(),
        "compile_seconds": compile_seconds,
    }
    if lowered.holds:
        row["sampled_milliseconds"] = []
        for _ in range(_BLOCKS):
            training.rewind()
            row["sampled_milliseconds"].append(1e3 * training.seconds(1)[0])
    return row | also(training)


def nonzero_gradients(state: TrainState) -> float:
    """Returns the share of elements of kernels whose first moment is not zero.

    After step 0 that is where the gradient was not.
    """
    moments = nnx.to_flat_state(optax.tree.get(state.opt_state, "mu"))
    kernels = [x.get_value() for path, x in moments if path[-1] == "kernel"]
    found = sum(float(jnp.count_nonzero(x)) for x in kernels)
    return found / sum(x.size for x in kernels)


def device_bytes() -> int | None:
    """Returns the most bytes that this process has had on one device, if known."""
    stats = [device.memory_stats() for device in jax.local_devices()]
    peaks = [each["peak_bytes_in_use"] for each in stats if each]
    return max(peaks, default=None)


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
