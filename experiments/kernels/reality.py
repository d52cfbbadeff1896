"""What `experiments.plan` says of steps that have been measured.

    python -m experiments.kernels.reality --steps steps.jsonl [--out FILE]

Takes rows of `experiments.kernels.step` on one device, plans each policy, model and
batch of them on a CPU, and prints planned over measured memory and time. A plan is of
the same program: with a mask of documents where rows have several.
"""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jax.sharding import Mesh
from rich.table import Table

from experiments import footprint, plan, presets, terminal
from experiments.devices import DEVICES
from experiments.kernels import arguments
from experiments.presets import ExperimentConfig
from fp4jax import policies, sharding
from fp4jax.train import JsonLines

_GIB = 2**30


def main(
    steps: arguments.File,
    *,
    cases: tuple[str, ...] = ("bf16",),
    out: Path | None = None,
) -> int:
    """Compares plans with measured steps.

    Args:
      steps: rows of experiments.kernels.step.
      cases: policies whose rows are compared; changed ones have no plan.
      out: file to which rows are added as JSON lines.
    """
    plan.make_devices(1)
    mesh = sharding.make_mesh()
    table = Table(
        "model", "case", "planned GiB", "measured", "ratio", "planned ms", "measured",
        "ratio",
    )  # fmt: skip
    for line in steps.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row["case"] not in cases or "milliseconds" not in row:
            continue
        try:
            found = compare(row, mesh)
        except ValueError as error:
            print(f"error: {error}", file=sys.stderr)
            return 2
        if out is not None:
            with JsonLines(out) as file:
                file.write(found)
        table.add_row(row["model"], row["case"], *_cells(found))
    terminal.console(100).print(table)
    return 0


def compare(row: Mapping[str, Any], mesh: Mesh) -> dict[str, Any]:
    """Returns the plan of a row of measurements beside it.

    Args:
      row: of `experiments.kernels.step`.
      mesh: of one device.

    Raises:
      ValueError: there is no plan of its case, or of its device.
    """
    if row["case"] not in policies.PRESETS:
        raise ValueError(
            f"reality: case must be one of {', '.join(policies.PRESETS)}, got "
            f"{row['case']!r}, of which there is no plan."
        )
    config = _config(row)
    integers = footprint.WHOLE if row["documents"] == 1 else footprint.PACKED
    found, seconds = plan.forecast(
        config, mesh=mesh, device=_device(row), integers=integers
    )
    planned = 1e3 * seconds.bounds[0]
    measured = min(row["milliseconds"])
    return {
        "model": row["model"],
        "case": row["case"],
        "batch": row["batch"],
        "documents": row["documents"],
        "set": row["set"],
        "planned_bytes": found.peak,
        "measured_bytes": row["program_bytes"],
        "bytes_ratio": found.peak / row["program_bytes"],
        "planned_milliseconds": planned,
        "measured_milliseconds": measured,
        "milliseconds_ratio": planned / measured,
        "parts": vars(seconds),
    }


def _config(row: Mapping[str, Any]) -> ExperimentConfig:
    """Returns the experiment whose steps a row is of."""
    rows, length = row["batch"]
    return presets.of_batch(row["model"], rows, length, *row["set"], policy=row["case"])


def _device(row: Mapping[str, Any]) -> str:
    """Returns the name that plans have for the device of a row."""
    kind = row["device"]["kind"]
    for name in DEVICES:
        if name in kind.split():
            return name
    raise ValueError(
        f"reality: device must be one of {', '.join(DEVICES)}, got {kind!r}. Measure "
        "on one of these."
    )


def _cells(row: Mapping[str, Any]) -> list[str]:
    planned, measured = (
        f"{row[f'{which}_bytes'] / _GIB:.1f}" for which in ("planned", "measured")
    )
    times = (f"{row[f'{which}_milliseconds']:.0f}" for which in ("planned", "measured"))
    bytes_ratio, ratio = row["bytes_ratio"], row["milliseconds_ratio"]
    return [planned, measured, f"{bytes_ratio:.2f}", *times, f"{ratio:.2f}"]


if __name__ == "__main__":
    sys.exit(terminal.command(main))
