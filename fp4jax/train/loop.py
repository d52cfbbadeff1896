"""Training from batch to batch, and the loss on held-out batches."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from fp4jax.policies import Policy, Schedule
from fp4jax.train.metrics import Evaluation, utilization
from fp4jax.train.state import TrainState
from fp4jax.train.step import Batch, Metrics, Step

Record = dict[str, Any]

_NOT_FINITE = (
    "train: loss and gradient must be finite, got loss={loss}, grad_norm={grad_norm} "
    "at step {step}, the last of {skipped} such in a row. {where}Lower the learning "
    "rate, or look at the data."
)


class Diverged(FloatingPointError):
    """Too many steps in a row were not finite.

    Attributes:
      records: of the steps since the last hand-over, up to the last of these.
    """

    def __init__(self, message: str, records: Sequence[Record]):
        super().__init__(message)
        self.records = records


def train(
    step: Step,
    state: TrainState,
    batches: Iterator[Batch],
    *,
    steps: int,
    flops_per_token: float,
    every: int | Sequence[int] = 10,
    max_skips: int = 10,
    stop: Callable[[], bool] = lambda: False,
    diagnose: Callable[[TrainState, Batch], str] | None = None,
) -> Iterator[tuple[TrainState, list[Record]]]:
    """Trains until `steps` steps are done, and hands over now and then.

    The device runs freely in between. The first step, which compiles, is handed over
    alone and without a speed. A state is valid until the next one is asked for.

    Args:
      step: from `make_train_step`.
      state: where to start from; consumed.
      batches: at least as many as there are steps to do; no more are drawn. The first
        is that of the state's step.
      steps: number of steps done at the end, counted from step 0 of the state's run.
      flops_per_token: the model's, for its utilization of the device.
      every: steps between two hand-overs, which fall on its multiples; of several
        numbers, on the multiples of each.
      max_skips: so many steps in a row whose loss or gradient is not finite end the
        training; fewer are skipped.
      stop: asked after every step; training ends with the step after which it is true.
      diagnose: finds where a step went wrong, from the state before it and its batch;
        the error says it.

    Yields:
      The state, and the records of the steps since the last hand-over: `step` (1 after
      the first), `loss`, `grad_norm`, `lr`, `skipped`, and `tokens_per_s`, `mfu` and
      `data_wait`, the part of the time that was spent on waiting for batches: means
      over these steps, None where unknown.

    Raises:
      ValueError: too few batches.
      Diverged: `max_skips` steps in a row were skipped; it has their records, and no
        state is handed over with them.
    """
    batches, done = iter(batches), int(state.step)
    periods = [every] if isinstance(every, int) else every
    devices = state.step.devices()
    compiled = stopped = False
    in_a_row = int(state.skipped_in_row)
    while done < steps and not stopped:
        ends = [(done // n + 1) * n for n in periods] if compiled else [done + 1]
        end, start = min(steps, *ends), time.perf_counter()
        waited, tokens, metrics, batch = 0.0, 0, [], {}
        while done + len(metrics) < end and not stopped:
            asked = time.perf_counter()
            if (batch := next(batches, None)) is None:
                raise ValueError(
                    f"train: batches must hold one for each of {steps} steps, got "
                    f"{done + len(metrics)}."
                )
            waited += time.perf_counter() - asked
            state, step_metrics = step(state, batch)
            metrics.append(step_metrics)
            tokens += batch["inputs"].size
            stopped = stop()
        before = in_a_row
        in_a_row, metrics = jax.device_get((state.skipped_in_row, metrics))  # waits
        seconds = time.perf_counter() - start
        speed = tokens / seconds if compiled else None
        mfu = speed and utilization(
            speed, flops_per_token=flops_per_token, devices=devices
        )
        means = {
            "tokens_per_s": speed,
            "mfu": mfu,
            "data_wait": waited / seconds if compiled else None,
        }
        records = [
            {"step": i, **_numbers(m), **means}
            for i, m in enumerate(metrics, start=done + 1)
        ]
        done, compiled = done + len(metrics), True
        failed = _failed(records, before, max_skips)
        if failed is not None:
            is_last = in_a_row >= max_skips  # and not finite again since
            where = _place(diagnose, state, batch) if diagnose and is_last else ""
            fields = records[failed - 1] | {"skipped": max_skips, "where": where}
            raise Diverged(_NOT_FINITE.format_map(fields), records[:failed])
        yield state, records


def train_phases(
    step_of: Callable[[Policy], Step],
    schedule: Schedule,
    state: TrainState,
    batches: Iterator[Batch],
    *,
    steps: int,
    **settings: Any,
) -> Iterator[tuple[TrainState, list[Record]]]:
    """Trains as `train` does, each phase of a schedule with a step of its own.

    Args:
      step_of: returns the step, from `make_train_step`, under a policy; it compiles at
        the first step of its phase, which is handed over alone.
      schedule: counted from step 0 of the state's run; a state that lies in a later
        phase goes on there.
      state: as for `train`.
      batches: for all phases.
      steps: of all phases.
      **settings: all others of `train`.

    Yields:
      What `train` yields.

    Raises:
      ValueError, Diverged: as `train`.
    """
    batches = iter(batches)
    for policy, end in schedule.spans(steps):
        if int(state.step) >= end:
            continue
        phase = train(step_of(policy), state, batches, steps=end, **settings)
        for state, records in phase:
            yield state, records
        if int(state.step) < end:  # it was stopped
            return


def evaluate(
    step: Callable[[TrainState, Batch], Metrics],
    state: TrainState,
    batches: Iterable[Batch],
    *,
    token_bytes: np.ndarray,
    place: Callable[[Batch], Batch] = lambda batch: batch,
) -> Evaluation:
    """Returns the loss over all tokens of `batches`, each weighing the same.

    Args:
      step: from `make_eval_step`.
      state: is only read.
      batches: of one shape, on the host.
      token_bytes: [v] int, the bytes of text that each token stands for.
      place: puts a batch on the devices.

    Raises:
      ValueError: batches without a token to predict.
    """
    nats, tokens, num_bytes = 0.0, 0, 0
    for batch in batches:
        nats += float(step(state, place(batch))["loss_sum"])
        targets = batch["targets"][batch["loss_mask"].astype(bool)]
        tokens += targets.size
        num_bytes += int(token_bytes[targets].sum())
    if not tokens:
        raise ValueError("evaluate: batches must hold a token to predict, got none.")
    return Evaluation(nats=nats, tokens=tokens, bytes=num_bytes)


def _place(
    diagnose: Callable[[TrainState, Batch], str], state: TrainState, batch: Batch
) -> str:
    """Returns what the diagnosis says; one that fails does not hide the divergence."""
    try:
        return f"{diagnose(state, batch)} "
    except Exception as error:  # out of memory, for one
        return f"Where is not known ({type(error).__name__}). "


def _failed(records: Sequence[Record], before: int, max_skips: int) -> int | None:
    """Returns how many records there are up to the last that may be skipped in a row.

    Args:
      records: of the steps since the last hand-over.
      before: how many steps in a row were skipped just before.
      max_skips: as many end the training.
    """
    in_a_row = before
    for count, record in enumerate(records, start=1):
        in_a_row = in_a_row + 1 if record.get("skipped") else 0
        if in_a_row >= max_skips:
            return count
    return None


def _numbers(metrics: Metrics) -> dict[str, float | int]:
    return {name: value.item() for name, value in metrics.items()}
