r"""What a run would take: memory, communication and time, without its devices.

python -m experiments.plan --model dense_1p5b --policy ufp4 --mesh fsdp=8 \
    --batch 64 --sequence 4096
"""

import dataclasses
import math
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated

import jax
import tyro
from jax.sharding import Mesh
from rich.table import Table

from experiments import named, presets, pretrain, terminal
from experiments.bill import bill
from experiments.devices import DEVICES
from experiments.estimate import Estimate, estimate
from experiments.footprint import PACKED, Footprint, measure
from experiments.presets import ExperimentConfig, RunConfig
from fp4jax import models, sharding
from fp4jax.data import DataConfig

# Options that are fields of the configuration.
_PATHS = {
    "batch": "data.batch_size",
    "sequence": "data.sequence_length",
    "microbatches": "run.microbatches",
}
_MOST = 2**11  # devices of a CPU; XLA takes those beyond for other processes'


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Compiles the training step for devices that are not there, and reads its bill.

    No array is made. The program is that of the CPU's compiler for so many virtual
    devices. What it sends is what accelerators send, but that a CPU sends bfloat16 as
    float32, and takes the sum of all for a part of it. Its peak memory is above that of
    accelerators, whose products take operands in bfloat16. The table says what each of
    its rows means, and whether the step fits in the memory of a device.
    """

    model: str = presets.MODEL
    """shape of the model, as for experiments.pretrain."""
    policy: str = "ufp4"
    """its policy, likewise."""
    mesh: Annotated[str, tyro.conf.arg(metavar="AXIS=N,...")] = "data=1"
    """devices, likewise."""
    batch: int = DataConfig.batch_size
    """rows of a batch, on all devices together."""
    sequence: int = DataConfig.sequence_length
    """tokens of a row."""
    microbatches: int = RunConfig.microbatches
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
        sizes = sharding.parse_mesh(arguments.mesh)
        check(arguments, sizes)
        config = configure(arguments)
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


def check(arguments: Arguments, sizes: Mapping[str, int]) -> None:
    """Raises ValueError for an option that cannot be planned.

    Args:
      arguments: of the command.
      sizes: of the axes of its mesh.
    """
    presets.known(arguments.device, DEVICES, flag="--device")
    named.policy(arguments.policy, flag="--policy")
    for option, path in _PATHS.items():
        if (value := getattr(arguments, option)) < 1:
            raise ValueError(f"--{option}: must be at least 1, got {value}.")
        if any(text.partition("=")[0] == path for text in arguments.set):
            raise ValueError(f"--set: {path} follows --{option}; give that instead.")
    parts = arguments.microbatches
    shards = math.prod(sizes.get(axis, 1) for axis in sharding.RULES["batch"])
    if arguments.batch % (parts * shards):
        raise ValueError(
            f"--batch: must be a multiple of {parts * shards}, that is of "
            f"--microbatches={parts} times {shards} along data, fsdp and expert of "
            f"--mesh, got {arguments.batch}."
        )


def configure(arguments: Arguments) -> ExperimentConfig:
    """Returns the experiment that the arguments describe.

    Raises:
      ValueError, TypeError: as `presets.resolve`.
    """
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
    length = config.data.sequence_length
    tokens = config.data.batch_size * length
    flops = tokens * models.flops_per_token(config.model, sequence_length=length)
    return bill(
        footprint,
        seconds,
        kind=DEVICES[device],
        devices=mesh.size,
        tokens=tokens,
        flops=flops,
    )


if __name__ == "__main__":
    sys.exit(main())
