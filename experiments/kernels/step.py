"""How long whole training steps take under each recipe, and what memory they need.

    python -m experiments.kernels.step [--model dense_1p5b] [--out FILE]

A step is what `experiments.pretrain` takes: forward and backward pass, clipping, AdamW;
its state is donated. Cases are traced several at a time, then compiled and timed one
after another, on batches of random tokens.
"""

import dataclasses
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import tyro
from rich.table import Table

from experiments import presets, record, terminal
from experiments.in_turn import ProcessDied, in_turn, share_memory
from experiments.kernels import cases, programs
from experiments.kernels.chosen import Grouped, Packed, Quantize, choice
from experiments.presets import ExperimentConfig
from fp4jax import models
from fp4jax.kernels.choice import KERNELS
from fp4jax.train import JsonLines
from fp4jax.train.metrics import utilization

_GIB = 2**30
_TINY: dict[str, Any] = {
    "model": "tiny",
    "names": ("bf16", "ue5m3", "ti2d+fp8+packed"),
    "batch": 4,
    "sequence": 64,
    "documents": 2,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Times whole training steps."""

    model: str = "dense_1p5b"
    """as for experiments.pretrain."""
    names: tuple[str, ...] = tuple(cases.known())
    """policies as for experiments.pretrain, which may end in +packed (residuals) or
    +fp8 (compute), and qwix; the first is what others are compared with, if it could be
    measured."""
    batch: int = 16
    """rows of a batch."""
    sequence: int = 2048
    """tokens of a row."""
    documents: int = 1
    """of a row; attention to one document needs no mask."""
    grouped: Grouped = "default"
    """what multiplies groups of rows: kernels for Hopper GPUs, lax.ragged_dot."""
    quantize: Quantize = "default"
    """what quantizes: the device's kernels, or XLA."""
    packed: Packed = "default"
    """what multiplies by packed operands: XLA, which decodes them, or a kernel."""
    jobs: int = 1
    """processes that trace a case each, at a time; 1: this one does everything."""
    set: tyro.conf.UseAppendAction[tuple[str, ...]] = ()
    """sets a field of the configuration, such as model.remat=none."""
    limit: float = 300.0
    """seconds in which a process, when its turn has come, must be done, or is ended;
    one job has no limit."""
    out: Path | None = None
    """file to which rows are added as JSON lines, with versions, device and commit."""
    tiny: bool = False
    """a small model and few cases, where no others are named, for a look on any
    device."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; the exit status is 1 if a case could not be measured."""
    arguments = tyro.cli(
        Arguments, prog="python -m experiments.kernels.step", args=argv
    )
    if arguments.tiny:
        arguments = _tiny(arguments)
    if arguments.jobs > 1:
        share_memory()
    rows = []
    try:
        for row in run(arguments):
            rows.append(row)
            print(f"{row['case']}: {row.get('error') or terminal.milliseconds(row)}")
            if arguments.out is not None:
                with JsonLines(arguments.out) as file:
                    file.write(row)
    except (ValueError, TypeError, ModuleNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    terminal.console(140).print(table(rows))
    return 1 if any("error" in row for row in rows) else 0


def _tiny(arguments: Arguments) -> Arguments:
    """Returns small sizes and few cases, where none were asked for."""
    default = Arguments()
    small = {
        name: value
        for name, value in _TINY.items()
        if getattr(arguments, name) == getattr(default, name)
    }
    return dataclasses.replace(arguments, **small)


def run(arguments: Arguments) -> Iterator[dict[str, Any]]:
    """Yields a row for each case, once it is measured.

    Raises:
      ValueError, TypeError: as `presets.resolve`; an unknown name.
      ModuleNotFoundError: a case takes a library that is not there.
    """
    config = configure(arguments)
    if not 1 <= arguments.documents <= arguments.sequence:
        raise ValueError(
            "--documents: must be from 1 to the tokens of a row, "
            f"{arguments.sequence}, got {arguments.documents}."
        )
    for name in arguments.names:
        cases.find(name, config)  # raises
    base = None
    tasks = [(arguments, name) for name in arguments.names]
    for name, found in zip(
        arguments.names,
        in_turn(prepare, tasks, jobs=arguments.jobs, limit=arguments.limit),
        strict=True,
    ):
        row = {"model": arguments.model, "case": name, **_sizes(arguments, config)}
        row |= {"error": str(found)} if isinstance(found, ProcessDied) else found
        if "milliseconds" in row:
            base = _best(row) if name == arguments.names[0] else base
            row |= {} if base is None else {"ratio": _best(row) / base}
        yield row


def prepare(task: tuple[Arguments, str]) -> Callable[[], dict[str, Any]]:
    """Traces a case; returns what compiles and measures it."""
    arguments, name = task
    config = configure(arguments)
    batches = programs.batches(config, documents=arguments.documents)
    case = cases.find(name, config)
    kernels = choice(
        grouped=arguments.grouped, quantize=arguments.quantize, packed=arguments.packed
    )
    start = time.perf_counter()
    try:
        with KERNELS(kernels):
            lowered = programs.lower(case, config, batches[0])
    except Exception as error:  # of a kernel that this device lacks, any
        row = record.failure(error)
        return lambda: row
    seconds = time.perf_counter() - start

    def measure() -> dict[str, Any]:
        try:
            row = programs.measure(lowered, batches)
        except Exception as error:  # likewise, or for want of memory
            return record.failure(error)
        about = {**case.about, "trace_seconds": seconds, **record.setting()}
        return row | _speed(row, config) | about

    return measure


def configure(arguments: Arguments) -> ExperimentConfig:
    """Returns the experiment that the arguments describe."""
    return presets.of_batch(
        arguments.model, arguments.batch, arguments.sequence, *arguments.set
    )


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """Returns the rows as people read them."""
    columns = ("case", "ms", "again", "sampled", "tokens/s", "MFU", "ratio")
    table = Table(*columns, "program GiB", "device GiB", "nonzero", "loss")
    for row in rows:
        if "error" in row:
            table.add_row(row["case"], row["error"])
            continue
        sampled = row.get("sampled_milliseconds")
        share, device = row["utilization"], row["device_bytes"]
        ratio = row.get("ratio")
        table.add_row(
            row["case"],
            *(f"{ms:.1f}" for ms in row["milliseconds"]),
            "" if sampled is None else f"{min(sampled):.1f}",
            f"{row['tokens_per_second']:,.0f}",
            "" if share is None else f"{share:.1%}",
            "" if ratio is None else f"{ratio:.3f}",
            f"{row['program_bytes'] / _GIB:.2f}",
            "" if device is None else f"{device / _GIB:.2f}",
            f"{row['nonzero_gradients']:.1%}",
            f"{row['loss']:.3f}",
        )
    return table


def _speed(row: dict[str, Any], config: ExperimentConfig) -> dict[str, Any]:
    length = config.data.sequence_length
    speed = config.data.batch_size * length / (_best(row) / 1e3)
    flops = models.flops_per_token(config.model, sequence_length=length)
    devices = jax.devices()[:1]
    share = utilization(speed, flops_per_token=flops, devices=devices)
    return {"tokens_per_second": speed, "utilization": share}


def _sizes(arguments: Arguments, config: ExperimentConfig) -> dict[str, Any]:
    return {
        "batch": [arguments.batch, arguments.sequence],
        "documents": arguments.documents,
        "remat": config.model.remat,
        "grouped": arguments.grouped,
        "quantize": arguments.quantize,
        "packed": arguments.packed,
        "set": list(arguments.set),
    }


def _best(row: dict[str, Any]) -> float:
    return min(row["milliseconds"])


if __name__ == "__main__":
    sys.exit(main())
