"""How fast training is on one GPU and on all of this host, over several meshes.

    python -m experiments.scaling_gpus.run [--out FILE]
    python -m experiments.scaling_gpus.run --dry  # small models on 8 virtual devices

Weak scaling keeps the rows of a device, strong scaling those of all devices together.
Every measurement is a process of its own, unless there is one job.
"""

import dataclasses
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import tyro

from experiments import record, terminal
from experiments.collectives import collectives
from experiments.in_turn import ProcessDied, in_turn
from experiments.kernels import cases, programs
from experiments.kernels.chosen import Exchange, Grouped, choice
from experiments.kernels.programs import Training
from experiments.scaling_gpus import communication, setting
from experiments.scaling_gpus.table import best, compared, table, verdicts
from experiments.scaling_gpus.tasks import (
    LARGE,
    MODELS,
    SMALL,
    STRONG,
    WEAK,
    Task,
    tasks,
)
from fp4jax import models, sharding
from fp4jax.kernels.choice import KERNELS
from fp4jax.train import JsonLines
from fp4jax.train.metrics import utilization

_TRACED_STEPS = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Measures training steps on one device and on all."""

    models: tuple[str, ...] = LARGE
    """of experiments.scaling_gpus.tasks."""
    policies: tuple[str, ...] = ("bf16", "ufp4", "ti2d+fp8")
    """as for experiments.kernels.step; bf16 first."""
    meshes: tuple[str, ...] = ()
    """such as fsdp=8; by default of all devices: each axis, and fsdp with tensor."""
    scalings: tuple[str, ...] = (WEAK, STRONG)
    """of the rows of a batch."""
    grouped: Grouped = "default"
    """what multiplies groups of rows."""
    exchange: Exchange = "default"
    """what sends tokens to experts; dense: all of the room for them."""
    jobs: int = 4
    """processes of one measurement each, at a time; 1: this one does everything."""
    limit: float = 300.0
    """seconds in which a process, when its turn has come, must be done, or is ended;
    one job has no limit."""
    out: Path | None = None
    """file to which rows are added as JSON lines, with versions, device and commit."""
    dry: bool = False
    """small models, on virtual devices of the CPU."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; the exit status is 1 if something could not be measured."""
    arguments = tyro.cli(
        Arguments, prog="python -m experiments.scaling_gpus.run", args=argv
    )
    setting.prepare(dry=arguments.dry)
    rows = []
    try:
        check(arguments)
        if arguments.dry:
            arguments = dataclasses.replace(arguments, models=_small(arguments.models))
        for row in run(arguments):
            rows.append(row)
            what = " ".join(row[key] for key in ("model", "case", "mesh", "scaling"))
            print(f"{what}: {row.get('error') or terminal.milliseconds(row)}")
            if arguments.out is not None:
                with JsonLines(arguments.out) as file:
                    file.write(row)
    except (ValueError, ModuleNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    terminal.console(180).print(table(rows))
    print(verdicts(rows))
    return 1 if any("error" in row for row in rows) else 0


def run(arguments: Arguments) -> Iterator[dict[str, Any]]:
    """Yields a row for each measurement."""
    found = list(
        tasks(
            arguments.models,
            arguments.policies,
            devices=jax.device_count(),
            only=arguments.meshes,
            scalings=arguments.scalings,
            grouped=arguments.grouped,
            exchange=arguments.exchange,
        )
    )
    rows = []
    results = in_turn(prepare, found, jobs=arguments.jobs, limit=arguments.limit)
    for task, result in zip(found, results, strict=True):
        row = dataclasses.asdict(task)
        row |= {"error": str(result)} if isinstance(result, ProcessDied) else result
        if "error" not in row:
            row |= compared(row, rows)
        rows.append(row)
        yield row


def _small(names: Sequence[str]) -> tuple[str, ...]:
    """Returns the models that stand for large ones on a CPU, and says so."""
    standing = dict(zip(LARGE, SMALL, strict=True))
    for name in (name for name in names if name in standing):
        print(f"{standing[name]} stands for {name}")
    return tuple(standing.get(name, name) for name in names)


def check(arguments: Arguments) -> None:
    """Checks what was asked for.

    Raises:
      ValueError: an unknown model, policy, mesh or scaling; a large model on a CPU.
      ModuleNotFoundError: a policy takes a library that is not there.
    """
    for flag, given, known in (
        ("--models", arguments.models, MODELS),
        ("--scalings", arguments.scalings, (WEAK, STRONG)),
    ):
        for name in set(given) - set(known):
            raise ValueError(f"{flag}: must be of {', '.join(known)}, got {name!r}.")
    for mesh in arguments.meshes:
        sharding.parse_mesh(mesh)
    for task in tasks(arguments.models, arguments.policies, devices=1):
        cases.find(task.case, task.config)
    large = [name for name in arguments.models if name in LARGE]
    if large and not arguments.dry and jax.default_backend() == "cpu":
        raise ValueError(
            f"--models: {large[0]} must have GPUs, got {jax.device_count()} devices of "
            "a CPU. Use --dry for small models."
        )


def prepare(task: Task) -> Callable[[], dict[str, Any]]:
    """Traces a measurement; returns what compiles and makes it."""
    try:
        config = task.config
        mesh = sharding.make_mesh(**sharding.parse_mesh(task.mesh))
        case = cases.find(task.case, config)
        batch = config.data.batch_size, config.data.sequence_length
        batches = programs.batches(config, mesh=mesh)
        with KERNELS(choice(grouped=task.grouped, exchange=task.exchange)):
            lowered = programs.lower(case, config, batches[0], mesh=mesh)
    except Exception as error:  # of this measurement alone
        failed = record.failure(error)
        return lambda: failed

    def measure() -> dict[str, Any]:
        try:
            row = programs.measure(lowered, batches, also=_communication)
        except Exception as error:  # likewise, or for want of memory
            return record.failure(error)
        speed = batch[0] * batch[1] / (best(row) / 1e3)
        flops = models.flops_per_token(config.model, sequence_length=batch[1])
        devices = mesh.devices.flat
        share = utilization(speed, flops_per_token=flops, devices=devices)
        return row | {
            "batch": list(batch),
            "tokens_per_second": speed,
            "utilization": share,
            **record.setting(),
        }

    return measure


def _communication(training: Training) -> dict[str, Any]:
    """Returns what devices send in a step, and the part of its time that takes."""
    sent = Counter()
    for each in collectives(training.program):
        sent[each.kind] += each.bytes * each.times
    found = communication.watch(lambda: training.seconds(_TRACED_STEPS))
    return {
        "collective_bytes": dict(sent),
        "communication_share": None if found is None else found.share,
        "exposed_share": None if found is None else found.exposed,
    }


if __name__ == "__main__":
    sys.exit(main())
