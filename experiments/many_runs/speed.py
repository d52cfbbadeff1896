"""How fast runs train, by policy, lanes and kernels: what the studies can afford.

    python -m experiments.many_runs.speed --tokens tokens --out FOLDER --jobs 14

The studies' --dry expects of runs what the rows of this command say.
"""

import dataclasses
import itertools
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from experiments import terminal
from experiments.many_runs import queue
from experiments.many_runs.queue import How, Task
from experiments.many_runs.run import Run
from fp4jax import data
from fp4jax.data import DataConfig

_SLOW = 5  # steps at once of what may take a second each


def tasks(how: How, base: Run) -> Iterator[Task]:
    """Yields what is timed.

    Args:
      how: to perform one run by the default kernels.
      base: the run, of a dense model in BF16.
    """
    xla, ragged, hopper = (
        dataclasses.replace(how, quantize="xla"),
        dataclasses.replace(how, grouped="ragged"),
        dataclasses.replace(how, grouped="hopper"),
    )
    hopper_xla = dataclasses.replace(hopper, quantize="xla")
    moe = dataclasses.replace(
        base, model="moe_tiny" if base.model == "tiny" else "moe_11m"
    )
    slow = dataclasses.replace(
        moe, at_once=_SLOW, tokens=moe.tokens // moe.at_once * _SLOW
    )
    cases = [  # what takes long to trace later
        (base, "bf16", how, 1),
        (base, "ufp4", xla, 1),
        (base, "nvfp4", xla, 1),
        (base, "bf16", how, 3),
        (moe, "bf16", hopper, 1),
        (base, "ufp4", xla, 3),
        (moe, "ufp4", hopper_xla, 1),
        (base, "ufp4", how, 1),
        (base, "nvfp4", how, 1),
        (base, "ufp4", how, 3),
        (moe, "bf16", hopper, 3),
        (moe, "ufp4", hopper, 1),
        (slow, "bf16", ragged, 1),
        (slow, "bf16", how, 1),
    ]
    for run, policy, kernels, lanes in cases:
        runs = (
            dataclasses.replace(run, policy=policy, seed=seed, noise=seed)
            for seed in range(lanes)
        )
        yield Task(tuple(runs), dataclasses.replace(kernels, lanes=lanes))


def main(
    *,
    tokens: str,
    out: Path,
    model: str = "dense_9m",
    jobs: int = 1,
    cases: int = 99,
    calls: int = 3,
) -> None:
    """Times every case.

    Args:
      tokens: folder that experiments.tokenize made.
      out: folder for results.jsonl.
      model: of the dense cases; tiny for a look on any device.
      jobs: processes that trace and compile at a time.
      cases: how many of them.
      calls: of the program, the first one not timed.
    """
    config = DataConfig(source=tokens)
    config = dataclasses.replace(config, **data.decided_by_source(config))
    how = How(data=config, out=out / "results.jsonl", deadline=time.time() + 1e6)
    base = Run(policy="bf16", model=model, tokens=0, lr=2e-3)
    if model == "tiny":
        base = dataclasses.replace(base, rows=2, length=64, at_once=2)
    size = base.rows * base.length * base.at_once
    base = dataclasses.replace(base, tokens=calls * size)
    queue.perform_all(list(itertools.islice(tasks(how, base), cases)), jobs=jobs)


if __name__ == "__main__":
    sys.exit(terminal.command(main))
