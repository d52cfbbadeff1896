"""What becomes of runs: rows of results."""

import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

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

Found = dict[str, NDArray]  # the metrics of steps, on the host

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


def perform(program: Program, runs: Sequence[Run], setting: Setting) -> list[Row]:
    """Trains and evaluates runs, side by side if the program has lanes for them.

    Raises:
      TooLong: they would not be done in time.
    """
    began = time.perf_counter()
    state, metrics, speed = _train(program, runs, setting)
    shared = {
        "seconds": time.perf_counter() - began,
        "tokens_per_s": speed,
        "lanes": program.lanes,
        "trace_seconds": program.trace_seconds,
        "compile_seconds": program.compile_seconds,
        "versions": record.setting()["versions"],
        **setting.about,
    }
    return [
        run.piece | _of_lane(program, run, lane, found, setting) | shared
        for run, lane, found in _lanes(program, runs, state, metrics)
    ]


def _train(
    program: Program, runs: Sequence[Run], setting: Setting
) -> tuple[TrainState, Found, float]:
    """Returns the last state, the metrics of all steps, and tokens/s."""

    def argument(values: Iterable[Any], dtype: Any) -> NDArray:
        values = list(values)
        return np.asarray(values if program.lanes else values[0], dtype)

    steps, n = runs[0].steps, runs[0].at_once
    orders = [
        text.orders(setting.corpus, run.batches(setting.data), steps=n) for run in runs
    ]
    state = program.start(
        argument((run.seed for run in runs), np.uint32),
        argument((run.noise for run in runs), np.uint32),
    )
    rates, rows = [run.rates for run in runs], argument(map(next, orders), np.int32)
    kept: list[Found] = []
    began = [time.perf_counter()]
    for first in range(0, steps, n):
        at = argument((rate[first : first + n] for rate in rates), np.float32)
        state, metrics = program.advance(state, setting.whole, rows, at)
        rows = argument(map(next, orders), np.int32)  # while the device is at work
        kept.append(jax.device_get(metrics))
        began.append(time.perf_counter())
        left = (steps - first - n) * (began[-1] - began[-2]) / n
        if len(kept) == 2 and time.time() + left + _SPARE > setting.deadline:
            raise TooLong(left + began[-1] - began[0])
        if np.all(np.asarray(state.skipped_in_row) >= _SKIPS):
            break
    # The first call also waits for what came before it.
    since = 1 if len(kept) > 1 else 0
    tokens = (len(kept) - since) * n * runs[0].rows * runs[0].length * len(runs)
    speed = tokens / (began[-1] - began[since])
    whole = {k: np.concatenate([x[k] for x in kept], axis=-1) for k in kept[0]}
    return state, whole, speed


def _lanes(
    program: Program, runs: Sequence[Run], state: TrainState, metrics: Found
) -> Iterator[tuple[Run, TrainState, Found]]:
    for index, run in enumerate(runs):
        at = lambda x, index=index: x[index] if program.lanes else x
        yield run, jax.tree.map(at, state), jax.tree.map(at, metrics)


def _of_lane(
    program: Program, run: Run, state: TrainState, metrics: Found, setting: Setting
) -> Row:
    """Returns what was found of one run."""
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
