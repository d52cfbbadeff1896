"""What a run would take: memory, communication and time, without its devices.

python -m experiments.plan --model dense_1p5b --policy ufp4 --mesh fsdp=8 --batch 64
"""

import dataclasses
import math
import os
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Annotated

import jax
import tyro
from jax.sharding import Mesh
from rich.table import Table

from experiments import presets, pretrain, terminal
from experiments.devices import DEVICES
from experiments.estimate import Estimate, estimate
from experiments.footprint import PACKED, Footprint, measure
from experiments.presets import ExperimentConfig
from fp4jax import models, sharding

GIB = 2**30
_MOST = 2**11  # devices of a CPU; XLA takes those beyond for other processes'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Compiles the training step for devices that are not there, and reads its bill.

    No array is made. The program is that of the CPU's compiler for so many virtual
    devices. What it sends is what accelerators send, but that a CPU sends bfloat16 as
    float32, and takes the sum of all for a part of it. Its peak memory is above that of
    accelerators, whose products take operands in bfloat16.
    """

    model: str = presets.MODEL
    """shape of the model, as for experiments.pretrain."""
    policy: str = "ufp4"
    """its policy, likewise."""
    mesh: Annotated[str, tyro.conf.arg(metavar="AXIS=N,...")] = "data=1"
    """devices, likewise."""
    batch: int = 64
    """rows of a batch, on all devices together."""
    sequence: int = 4096
    """tokens of a row."""
    microbatches: int = 1
    """parts in which a batch is processed."""
    device: str = "H100"
    """what the devices are: H100, H200, B200 or MI350."""
    set: Annotated[
        tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="PATH=VALUE")
    ] = ()
    """sets a field of the configuration, likewise."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    arguments = tyro.cli(Arguments, prog="python -m experiments.plan", args=argv)
    try:
        config = configure(arguments)
        sizes = sharding.parse_mesh(arguments.mesh)
        make_devices(math.prod(sizes.values()))
        mesh = pretrain.parse_mesh(arguments.mesh, config) or sharding.make_mesh()
        table = plan(config, mesh=mesh, device=arguments.device)
    except (ValueError, TypeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    terminal.console(100).print(table)
    return 0


def make_devices(count: int) -> None:
    """Makes virtual devices of the CPU, before there are any.

    Raises:
      ValueError: more than its compiler takes for those of one process.
    """
    if count > _MOST:
        raise ValueError(
            f"--mesh: must have at most {_MOST} devices, got {count}. Plan fewer along "
            "data, each with as many rows of a batch: it holds the same."
        )
    # The program does not run: nothing is gained by optimizing its instructions.
    level = "--xla_backend_optimization_level=0"
    os.environ["XLA_FLAGS"] = f"{level} {os.environ.get('XLA_FLAGS', '')}"
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", count)


def configure(arguments: Arguments) -> ExperimentConfig:
    """Returns the experiment that the arguments describe.

    Raises:
      ValueError, TypeError: as `presets.resolve`; an unknown device.
    """
    if arguments.device not in DEVICES:
        raise ValueError(
            f"--device: must be one of {', '.join(DEVICES)}, got {arguments.device!r}."
        )
    return presets.of_batch(
        arguments.model,
        arguments.batch,
        arguments.sequence,
        f"run.microbatches={arguments.microbatches}",
        *arguments.set,
        policy=arguments.policy,
    )


def forecast(
    config: ExperimentConfig,
    *,
    mesh: Mesh,
    device: str,
    integers: Sequence[str] = PACKED,
) -> tuple[Footprint, Estimate]:
    """Returns what each device of a mesh needs, and how long a step takes there.

    Args:
      config: its first policy counts.
      mesh: of as many devices as the run is to have.
      device: what they are.
      integers: of a batch, as for `footprint.measure`.
    """
    footprint, model = measure(config, mesh=mesh, integers=integers)
    seconds = estimate(
        model,
        config,
        mesh=mesh,
        device=DEVICES[device],
        state_bytes=footprint.params + footprint.optimizer,
        collectives=footprint.collectives,
    )
    return footprint, seconds


def plan(config: ExperimentConfig, *, mesh: Mesh, device: str) -> Table:
    """Returns what each device of a mesh needs and does, as a table."""
    footprint, seconds = forecast(config, mesh=mesh, device=device)
    kind = DEVICES[device]
    length = config.data.sequence_length
    tokens = config.data.batch_size * length
    flops = tokens * models.flops_per_token(config.model, sequence_length=length)
    best, worst = seconds.bounds
    peak = flops / mesh.size / kind.flops
    table = Table(title=f"{mesh.size} x {device}, {kind.memory:.0f} GiB; each of them:")
    table.add_column("what")
    table.add_column("how much", justify="right")
    for name, value in {
        **_sizes(footprint),
        "FLOPs of the model in a step": f"{flops / mesh.size:.3e}",
        **_times(seconds),
        "seconds of a step": f"{best:.3f} to {worst:.3f}",
        "tokens/s of all": f"{tokens / worst:,.0f} to {tokens / best:,.0f}",
        "utilization": f"{peak / worst:.1%} to {peak / best:.1%}",
    }.items():
        table.add_row(name, value)
    return table


def _sizes(footprint: Footprint) -> dict[str, str]:
    sent = Counter()
    for each in footprint.collectives:
        sent[f"{each.kind} in a step"] += each.bytes * each.times
    sizes = {
        "parameters": footprint.params,
        "optimizer": footprint.optimizer,
        "residuals": footprint.residuals,
        "these and gradients": footprint.least,
        "peak, as a CPU has it": footprint.peak,
        **sent,
    }
    return {name: f"{size / GIB:.3f} GiB" for name, size in sizes.items()}


def _times(seconds: Estimate) -> dict[str, str]:
    return {
        f"seconds of {name}": f"{value:.4f}" for name, value in vars(seconds).items()
    }


if __name__ == "__main__":
    sys.exit(main())
