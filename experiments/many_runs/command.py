"""The command of a study of many runs."""

import dataclasses
import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import tyro

from experiments import study, terminal
from experiments.kernels.chosen import Grouped, Quantize
from experiments.many_runs import budget, queue, show
from experiments.many_runs.found import Found
from experiments.many_runs.queue import How
from experiments.many_runs.run import Run
from experiments.presets import REFERENCE
from experiments.report.tables import counted
from fp4jax import data
from fp4jax.data import DataConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    """A question that runs answer.

    Attributes:
      folder: holds README.md and results.jsonl.
      queue: returns the runs, the most important first, for what all studies have
        found so far; asked again once these are done. Where a learning rate is not
        known yet there are no runs at it, or runs at the rate that is the second
        argument.
      tiny: the few small ones that show that all of it works.
      parts: returns the tables of the README by name, and draws figures into a folder.
      front: returns those of the project's front page.
    """

    folder: Path
    queue: Callable[[Found, float | None], Sequence[Run]]
    tiny: Sequence[Run]
    parts: Callable[[Found, Path], Mapping[str, str]]
    front: Callable[[Found], Mapping[str, str]] = lambda found: {}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Trains the runs that a study still lacks, and shows what was found."""

    data: str = DataConfig.source
    """folder that experiments.tokenize made, or other text as experiments.pretrain has
    it."""
    out: Path | None = None
    """folder for results.jsonl and figures in place of the study's own."""
    limit: float = math.inf
    """seconds; a run that would take longer than what is left of them is not begun."""
    jobs: int = 1
    """processes that trace and compile at a time, while one of them trains on each
    GPU; with one alone all is done on the first."""
    quantize: Quantize = "default"
    """what quantizes: the device's kernels, or XLA, which takes less time to trace."""
    grouped: Grouped = "default"
    """what multiplies groups of rows: kernels for Hopper GPUs, lax.ragged_dot."""
    only: tuple[str, ...] = ()
    """policies to train; all others wait."""
    dry: bool = False
    """prints the queue and what each run is expected to take, and trains nothing."""
    show: bool = False
    """only makes tables and figures anew of the results that are there."""
    tiny: bool = False
    """a few runs of small models, for a look on any device; needs --out."""


def main(
    about: Study, argv: Sequence[str] | None = None, *, description: str | None = None
) -> int:
    """Runs the command; the description is its help's.

    Returns:
      The exit status: 1 if a process did not survive, 2 for what cannot be done, 130
      after Ctrl-C.
    """
    name = f"python -m experiments.{about.folder.name}"
    arguments = tyro.cli(Arguments, prog=name, description=description, args=argv)
    folder, died = arguments.out or about.folder, 0
    out = folder / "results.jsonl"
    try:
        if arguments.tiny and arguments.out is None:
            raise ValueError("--tiny: must come with --out, a folder for its results.")
        _check(about, arguments)
        if arguments.dry:
            found = Found.of(out)
            runs = _queue(about, arguments, found, assumed=budget.RATE)
            shown = budget.table(runs, found)
            terminal.console(120).print(shown)
            return 0
        _make(folder)
        if not arguments.show:
            died = _train(about, arguments, out)
        found = Found.of(out)
        if arguments.tiny:
            rows = found.rows_of(about.tiny)
            parts = {"tiny": show.of_gaps(rows, base=about.tiny[0].policy)}
        else:
            parts = about.parts(found, folder)
        if arguments.out is None:
            study.show(about.folder / "README.md", parts)
            study.show(about.folder.parents[1] / "README.md", about.front(found))
    except (ValueError, TypeError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        text = "interrupted: runs that had ended are kept; the same command goes on."
        print(text, file=sys.stderr)
        return 130
    for name, text in parts.items():
        print(f"{name}\n\n{text}\n")
    return int(died > 0)


def _check(about: Study, arguments: Arguments) -> None:
    if arguments.jobs < 1:
        raise ValueError(f"--jobs: must be at least 1, got {arguments.jobs}.")
    if not arguments.limit > 0:
        raise ValueError(
            f"--limit: must be a positive number of seconds, got {arguments.limit}."
        )
    every = about.tiny if arguments.tiny else about.queue(Found([]), budget.RATE)
    known = {run.policy: None for run in every}
    if unknown := [name for name in arguments.only if name not in known]:
        raise ValueError(
            f"--only: must name policies of the study, {', '.join(known)}, got "
            f"{', '.join(unknown)}."
        )


def _make(folder: Path) -> None:
    """Makes a folder, before anything is trained whose result belongs there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError("it is read-only")
    except OSError as error:
        raise ValueError(
            f"--out: must be a folder to write to, got {str(folder)!r}: {error}."
        ) from error


def _queue(
    about: Study, arguments: Arguments, found: Found, *, assumed: float | None = None
) -> list[Run]:
    runs = about.tiny if arguments.tiny else about.queue(found, assumed)
    return [run for run in runs if not arguments.only or run.policy in arguments.only]


def _train(about: Study, arguments: Arguments, out: Path) -> int:
    """Trains until the queue has nothing more, or there is no time for what it has.

    Returns:
      How many processes did not survive.
    """
    config = DataConfig(source=arguments.data)
    config = dataclasses.replace(config, **data.decided_by_source(config))
    how = How(
        data=config,
        out=out,
        deadline=time.time() + arguments.limit,
        quantize=arguments.quantize,
        grouped=arguments.grouped,
    )
    corpus = data.load_corpus(config).fingerprint
    died, tried = 0, set[Run]()
    while True:
        found = Found.of(out, corpus=corpus)
        runs = _queue(about, arguments, found)
        runs = [run for run in runs if run not in tried and not found.row(run)]
        if not runs:
            _say_what_waits(about, arguments, found)
            return died
        died += queue.perform_all(list(queue.tasks(runs, how)), jobs=arguments.jobs)
        tried.update(runs)


def _say_what_waits(about: Study, arguments: Arguments, found: Found) -> None:
    """Says how many runs were not done, or need a learning rate that is not known."""
    known = _queue(about, arguments, found)
    if left := sum(found.row(run) is None for run in known):
        print(f"Not done: {counted(left, 'run')}. The same command goes on.")
    more = set(_queue(about, arguments, found, assumed=budget.RATE)) - set(known)
    if not more:
        return
    runs = counted(len(more), "run")
    tried = [run for run in about.queue(found, None) if run.policy == REFERENCE]
    if all(found.row(run) for run in tried):
        print(
            f"Without a learning rate: {runs}, as bf16 diverged at every rate that was "
            "tried. Add smaller ones to RATES of experiments.many_runs.tuning."
        )
    else:
        print(f"Waiting for learning rates, which bf16 is trained for: {runs}.")
