"""Runs in their order of importance, as many as there is time for.

A task is a compiled program and the runs that share it. Tasks are traced and compiled
several at a time, each in a process of its own, and have the device one after another:
time that one spends on compiling is time in which another trains. Of several GPUs each
has a task of its own.
"""

import contextlib
import dataclasses
import multiprocessing
import os
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import Empty, SimpleQueue

import jax

from experiments import record, study
from experiments.folder import Row
from experiments.in_turn import ProcessDied, in_turn, share_memory
from experiments.kernels.chosen import Grouped, Quantize, choice
from experiments.many_runs import budget, text
from experiments.many_runs.found import Found
from experiments.many_runs.perform import Setting, TooLong, perform
from experiments.many_runs.program import Program, compiled
from experiments.many_runs.run import Run
from fp4jax import data
from fp4jax.data import DataConfig
from fp4jax.kernels.choice import KERNELS


@dataclasses.dataclass(frozen=True, kw_only=True)
class How:
    """How runs are performed; but for rounding it changes no result.

    Attributes:
      data: folder of tokens, or another source of text.
      out: file of results.
      deadline: time of day in seconds by which all must be done.
      quantize, grouped: the kernels.
      git: the commit when the command began, before rows were added to its files.
    """

    data: DataConfig
    out: Path
    deadline: float
    quantize: Quantize = "default"
    grouped: Grouped = "default"
    git: str | None = dataclasses.field(default_factory=record.git_sha)


@dataclasses.dataclass(frozen=True)
class Task:
    """Runs that share a program, and how they are performed."""

    runs: tuple[Run, ...]
    how: How


def tasks(runs: Iterable[Run], how: How) -> Iterator[Task]:
    """Yields runs by their programs, in the order of the first of each."""
    by_program: dict[Run, list[Run]] = {}
    for run in runs:
        by_program.setdefault(run.program, []).append(run)
    yield from (Task(tuple(group), how) for group in by_program.values())


def perform_all(queue: Sequence[Task], *, jobs: int) -> int:
    """Performs tasks, one after another on each GPU, or all on another device.

    It says which ones a process did not survive.

    Args:
      queue: the tasks, the most important first.
      jobs: processes that there are at a time on all GPUs together, if need be a few
        more, so that each GPU has as many.

    Returns:
      How many of the tasks these are.
    """
    if jobs > 1:
        share_memory()
    devices = _gpus() if jobs > 1 else []
    if len(devices) < 2:
        return _perform(queue, jobs=jobs, device=None)
    waiting, jobs = SimpleQueue[Task | None](), -(-jobs // len(devices))
    for task in (*queue, *[None] * len(devices)):  # None ends what a GPU takes
        waiting.put(task)

    def perform(device: str) -> int:
        return _perform(iter(waiting.get, None), jobs=jobs, device=device)

    with ThreadPoolExecutor(len(devices)) as pool:
        try:
            return sum(pool.map(perform, devices))
        except KeyboardInterrupt:  # threads would take all that waits
            with contextlib.suppress(Empty):
                while True:
                    waiting.get_nowait()
            for _ in devices:
                waiting.put(None)
            for process in multiprocessing.active_children():
                process.kill()
            raise


def _gpus() -> list[str]:
    """Returns the names of the GPUs that this process sees, [] where there are none."""
    if jax.default_backend() != "gpu":
        return []
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return visible.split(",")
    return [str(i) for i in range(jax.local_device_count())]


def _perform(tasks: Iterable[Task], *, jobs: int, device: str | None) -> int:
    """Performs tasks one after another, on one GPU or on whatever there is."""
    died, taken = 0, deque[Task]()

    def noted() -> Iterator[Task]:
        for task in tasks:
            taken.append(task)
            yield task

    for found in in_turn(prepare, noted(), jobs=jobs, device=device):
        task = taken.popleft()
        if isinstance(found, ProcessDied):
            died += 1
            first = task.runs[0]  # others share its policy and its model
            about = f"{first.model} {first.policy}: {found}"
            print(about, file=sys.stderr, flush=True)
    return died


def prepare(task: Task) -> Callable[[], int]:
    """Compiles a task; returns what performs it, and says how many runs it did."""
    how, first = task.how, task.runs[0]
    if time.time() > how.deadline:
        return lambda: 0
    corpus = data.load_corpus(how.data)
    whole = text.read(corpus, first.length)
    kernels = choice(grouped=how.grouped, quantize=how.quantize)
    program = compiled(first, whole, how.data.vocab_size, kernels=KERNELS(kernels))

    def finish() -> int:
        about = {"git": how.git, "corpus": corpus.fingerprint}
        about |= {"quantize": how.quantize, "grouped": how.grouped}
        setting = Setting(
            corpus=corpus,
            data=how.data,
            whole=jax.device_put(whole),
            deadline=how.deadline,
            about=about,
        )
        return _finish(task, program, setting)

    return finish


def _finish(task: Task, program: Program, setting: Setting) -> int:
    """Performs the runs of a task that there is time for; returns how many."""
    results = study.Results(task.how.out)
    for done, run in enumerate(task.runs):
        cost, is_measured = budget.seconds(run, Found(results.rows))
        try:
            if is_measured and time.time() + cost > setting.deadline:
                raise TooLong(cost)
            print(f"{_name(run)}: {run.steps} steps", flush=True)
            row = perform(program, run, setting)
        except TooLong as error:
            print(f"{_name(run)}: left out, {error}", flush=True)
            return done
        results.add(row)
        _say(row)
    return len(task.runs)


def _name(run: Run) -> str:
    return f"{run.model} {run.policy} lr {run.lr:g} seed {run.seed}.{run.noise}"


def _say(row: Row) -> None:
    loss = row["heldout"]["bf16"]["all"]["loss"]
    print(
        f"{_name(Run.of(row))}: held-out loss {loss:.4f}, "
        f"{row['seconds']:.0f} s, {row['tokens_per_s'] / 1e6:.3f}M tokens/s, traced in "
        f"{row['trace_seconds']:.0f} s, compiled in {row['compile_seconds']:.0f} s",
        flush=True,
    )
