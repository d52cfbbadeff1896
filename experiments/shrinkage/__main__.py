"""Measures how 4-bit grids shrink and blur arrays, beside a separate simulation.

    python -m experiments.shrinkage [--tiny] [--out FOLDER]

Prints a table for distributions with and without RHT, for scale formats, for stochastic
rounding, for transposed views and for a GEMM. In brackets: what a numpy simulation in
float64 that shares no code with the library printed.
"""

import dataclasses
import sys
from pathlib import Path

from rich.console import Console

from experiments import record, terminal
from experiments.shrinkage import show, study
from fp4jax import train


def main(tiny: bool = False, *, seed: int = 0, out: Path | None = None) -> None:
    """Measures all cases.

    Args:
      tiny: Small arrays: seconds, and figures that miss their tolerance.
      seed: Of the arrays and of stochastic rounding.
      out: New folder for results.jsonl and shrinkage.png.
    """
    sizes = study.TINY if tiny else study.Sizes()
    setting = {"sizes": dataclasses.asdict(sizes), "seed": seed, **record.setting()}
    if out:
        record.check_free(out)
        record.create(out, setting)
    rows = list(study.run(sizes, seed=seed))
    console = Console()
    for table in show.tables(rows):
        console.print(table)
    print(show.verdict(rows))
    if out:
        with train.JsonLines(out / "results.jsonl") as log:
            for row in rows:
                log.write(show.record(row))
        show.plot(rows, out / "shrinkage.png")


if __name__ == "__main__":
    sys.exit(terminal.command(main))
