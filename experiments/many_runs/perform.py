"""What becomes of a run: a row of results."""

import dataclasses
import math
import time
from collections.abc import Callable

import jax
import numpy as np
from numpy.typing import NDArray

from experiments import heldout, record
from experiments.folder import Row
from experiments.many_runs import text
from experiments.many_runs.program import Program
from experiments.many_runs.run import Run
from experiments.many_runs.text import Text
from fp4jax import models
from fp4jax.data import Corpus, DataConfig
from fp4jax.train import Evaluation, TrainState

Metrics = dict[str, NDArray]  # of steps, on the host

_SKIPS = 10  # steps in a row without a finite gradient that end a run
_SPARE = 3.0  # seconds for evaluation, and for what was not foreseen


class TooLong(Exception):
    """A run would not end before its deadline; it was given up after its first steps.

    Attributes:
      seconds: that it would take.
    """

    def __init__(self, seconds: float):
        super().__init__(f"it takes {seconds:.0f} s")
        self.seconds = seconds


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """Where runs take place.

    Attributes:
      corpus: what they train on and are evaluated on.
      data: how the corpus is read.
      whole: its training rows, on the device.
      deadline: time of day in seconds by which a run must be done.
      about: further fields of every row.
    """

    corpus: Corpus
    data: DataConfig
    whole: Text
    deadline: float
    about: Row


def perform(program: Program, run: Run, setting: Setting) -> Row:
    """Trains and evaluates a run.

    Raises:
      TooLong: it would not be done in time.
    """
    began = time.perf_counter()
    state, metrics, speed = _train(program, run, setting)
    seconds = time.perf_counter() - began
    return {
        **run.piece,
        **_found(program, run, state, metrics, setting),
        "seconds": seconds,
        "tokens_per_s": speed,
        "trace_seconds": program.trace_seconds,
        "compile_seconds": program.compile_seconds,
        "versions": record.setting()["versions"],
        **setting.about,
    }


def _train(
    program: Program, run: Run, setting: Setting
) -> tuple[TrainState, Metrics, float]:
    """Returns the last state, the metrics of all steps, and tokens/s."""
    steps, n, rates = run.steps, run.at_once, run.rates
    orders = text.orders(setting.corpus, run.batches(setting.data), steps=n)
    state = program.start(np.uint32(run.seed), np.uint32(run.noise))
    rows, kept, began = next(orders), list[Metrics](), [time.perf_counter()]
    for first in range(0, steps, n):
        at = rates[first : first + n]
        state, metrics = program.advance(state, setting.whole, rows, at)
        rows = next(orders)  # while the device is at work
        kept.append(jax.device_get(metrics))
        began.append(time.perf_counter())
        left = (steps - first - n) * (began[-1] - began[-2]) / n
        if len(kept) == 2 and time.time() + left + _SPARE > setting.deadline:
            raise TooLong(began[-1] - began[0] + left + _SPARE)
        if state.skipped_in_row >= _SKIPS:
            break
    # The first call also waits for what came before it.
    since = 1 if len(kept) > 1 else 0
    tokens = (len(kept) - since) * n * run.rows * run.length
    speed = tokens / (began[-1] - began[since])
    whole = {k: np.concatenate([x[k] for x in kept]) for k in kept[0]}
    return state, whole, speed


def _found(
    program: Program, run: Run, state: TrainState, metrics: Metrics, setting: Setting
) -> Row:
    """Returns what the losses of a run and its last state tell."""
    taken = len(metrics["loss"])
    means = lambda name: metrics[name].reshape(-1, run.at_once).mean(1).tolist()
    shape = run.shape(setting.data.vocab_size)
    losses, tokens = means("loss"), taken * run.rows * run.length
    ended = int(state.skipped_in_row) >= _SKIPS or not math.isfinite(losses[-1])
    return {
        "steps": taken,
        "params": models.num_params(shape),
        "active_params": models.num_active_params(shape),
        "flops": tokens * models.flops_per_token(shape, sequence_length=run.length),
        "epochs": tokens / setting.corpus.num_train_tokens,
        "losses": losses,
        "grad_norms": means("grad_norm"),
        "skipped": int(state.skipped),
        "diverged": ended,
        "heldout": {
            name: _evaluate(step, state, run, setting)
            for name, step in program.evaluate.items()
        },
    }


def _evaluate(step: Callable, state: TrainState, run: Run, setting: Setting) -> Row:
    """Returns the held-out loss of each domain, and of "all" together."""
    found = heldout.evaluate(
        step,
        state,
        setting.corpus,
        run.batches(setting.data),
        place=text.without_documents,
    )
    found = {"all": Evaluation.sum(found.values())} | found
    return {
        name: {"loss": each.nats_per_token, "bits_per_byte": each.bits_per_byte}
        for name, each in found.items()
    }
