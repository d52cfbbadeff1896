"""Training from batch to batch, and the loss on held-out batches."""

import itertools
import math
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np

from fp4jax.policies import Policy, Schedule
from fp4jax.train.metrics import Evaluation, utilization
from fp4jax.train.state import TrainState
from fp4jax.train.step import Batch, Metrics

Record = dict[str, Any]
Step = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]

_NOT_FINITE = (
    "train: loss and gradient must be finite, got loss={loss}, grad_norm={grad_norm} "
    "at step {step}. Lower the learning rate, or look at the data."
)


def train(
    step: Step,
    state: TrainState,
    batches: Iterator[Batch],
    *,
    steps: int,
    flops_per_token: float,
    every: int = 10,
) -> Iterator[tuple[TrainState, list[Record]]]:
    """Trains until `steps` steps are done, and hands over every `every` of them.

    The device runs freely in between. The first step, which compiles, is handed over
    alone and without a speed. A state is valid until the next one is asked for.

    Args:
      step: from `make_train_step`.
      state: where to start from; consumed.
      batches: at least as many as there are steps to do; no more are drawn.
      steps: number of steps done at the end, counted from step 0 of the state's run.
      flops_per_token: the model's, for its utilization of the device.
      every: steps between two hand-overs, which fall on its multiples.

    Yields:
      The state, and the records of the steps since the last hand-over: `step` (1 after
      the first), `loss`, `grad_norm`, `lr`, and `tokens_per_s` and `mfu`, which are
      means over these steps, None where unknown.

    Raises:
      ValueError: too few batches.
      FloatingPointError: a loss or gradient that is not finite, once the records
        before it are handed over; the state beside them is then of no more use.
    """
    batches, done = iter(batches), int(state.step)
    devices = state.step.devices()
    compiled = False
    while done < steps:
        end = min(steps, (done // every + 1) * every) if compiled else done + 1
        start, tokens, metrics = time.perf_counter(), 0, []
        for batch in itertools.islice(batches, end - done):
            state, step_metrics = step(state, batch)
            metrics.append(step_metrics)
            tokens += batch["inputs"].size
        if len(metrics) < end - done:
            raise ValueError(
                f"train: batches must hold one for each of {steps} steps, got "
                f"{done + len(metrics)}."
            )
        metrics = jax.device_get(metrics)  # waits for the device
        speed = tokens / (time.perf_counter() - start) if compiled else None
        mfu = speed and utilization(
            speed, flops_per_token=flops_per_token, devices=devices
        )
        records = [
            {"step": i, **_floats(m), "tokens_per_s": speed, "mfu": mfu}
            for i, m in enumerate(metrics, start=done + 1)
        ]
        finite = list(itertools.takewhile(_is_finite, records))
        if finite:
            yield state, finite
        if len(finite) < len(records):
            raise FloatingPointError(_NOT_FINITE.format_map(records[len(finite)]))
        done, compiled = end, True


def train_phases(
    step_of: Callable[[Policy], Step],
    schedule: Schedule,
    state: TrainState,
    batches: Iterator[Batch],
    *,
    steps: int,
    flops_per_token: float,
    every: int = 10,
) -> Iterator[tuple[TrainState, list[Record]]]:
    """Trains as `train` does, each phase of a schedule with a step of its own.

    Args:
      step_of: returns the step, from `make_train_step`, under a policy; it compiles at
        the first step of its phase, which is handed over alone.
      schedule: counted from step 0 of the state's run.
      state: as for `train`, as all that follow.
      batches: for all phases.
      steps: of all phases.
      flops_per_token: the model's.
      every: steps between two hand-overs.

    Yields:
      What `train` yields.

    Raises:
      ValueError, FloatingPointError: as `train`.
    """
    batches = iter(batches)
    for policy, end in schedule.spans(steps):
        phase = train(
            step_of(policy),
            state,
            batches,
            steps=end,
            flops_per_token=flops_per_token,
            every=every,
        )
        for state, records in phase:
            yield state, records


def evaluate(
    step: Callable[[TrainState, Batch], Metrics],
    state: TrainState,
    batches: Iterable[Batch],
    *,
    token_bytes: np.ndarray,
) -> Evaluation:
    """Returns the loss over all tokens of `batches`, each weighing the same.

    Args:
      step: from `make_eval_step`.
      state: is only read.
      batches: of one shape.
      token_bytes: [v] int, the bytes of text that each token stands for.

    Raises:
      ValueError: batches without a token to predict.
    """
    nats, tokens, num_bytes = 0.0, 0, 0
    for batch in batches:
        nats += float(step(state, batch)["loss_sum"])
        targets = batch["targets"][batch["loss_mask"].astype(bool)]
        tokens += targets.size
        num_bytes += int(token_bytes[targets].sum())
    if not tokens:
        raise ValueError("evaluate: batches must hold a token to predict, got none.")
    return Evaluation(nats=nats, tokens=tokens, bytes=num_bytes)


def _floats(metrics: Metrics) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}


def _is_finite(record: Record) -> bool:
    return math.isfinite(record["loss"]) and math.isfinite(record["grad_norm"])
