"""Prints measured steps as a table in Markdown.

    python -m experiments.kernels.show steps.jsonl [families.jsonl ...]

The files are those that experiments.kernels.step wrote with --out.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import tyro

from experiments import terminal
from experiments.kernels import arguments

_GIB = 2**30
_HEAD = ("model", "tokens", "case", "ms", "tokens/s", "MFU", "over the first", "GiB")


def main(files: tyro.conf.Positional[tuple[arguments.File, ...]]) -> None:
    """Prints the rows of files, a row of `experiments.kernels.step` a line."""
    lines = [line for path in files for line in path.read_text("utf-8").splitlines()]
    print(markdown([json.loads(line) for line in lines]))


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Returns the table; of recipes that hold amaxes, with the time of other steps."""
    lines = [_HEAD, ["---"] * 3 + ["---:"] * 5, *map(_cells, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cells(row: Mapping[str, Any]) -> list[str]:
    rows, length = row["batch"]
    names = [f"`{row['model']}`", f"{rows} x {length}", f"`{row['case']}`"]
    if "error" in row:
        return [*names, row["error"], "", "", "", ""]
    ms = f"{min(row['milliseconds']):.1f}"
    if "sampled_milliseconds" in row:
        ms += f" ({min(row['sampled_milliseconds']):.1f})"
    share, ratio = row["utilization"], row.get("ratio")
    return [
        *names,
        ms,
        f"{row['tokens_per_second']:,.0f}",
        "" if share is None else f"{share:.1%}",
        "" if ratio is None else f"{ratio:.3f}",
        f"{row['program_bytes'] / _GIB:.1f}",
    ]


if __name__ == "__main__":
    sys.exit(terminal.command(main))
