"""Reports on runs, finished or not: gaps to BF16 against tokens seen, and a table.

python -m experiments.report runs/tiny-20260101-120000
python -m experiments.report runs/first runs/second --out both
"""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro

from experiments.report import figures, page, runs, tables
from experiments.report.standings import CAPTION, HEADER, standings, verdict
from experiments.terminal import console


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Reports on runs, finished or not: gaps to BF16 against tokens seen, and a table.

    - Writes runs.html, one page that needs nothing beside it, and its figures as PNG.
    - Runs of equal settings, which may differ in policies and seeds, are compared with
      one another; others get a section of their own.
    - Lines are means over the seeds that have come so far, bands a sample standard
      deviation to both sides. Gaps pair the runs of a seed at equal steps.
    - The page also shows what experiments.evaluate has left in the folders of runs.
    - Only reads the runs, which may still be training. Wrong arguments are one error,
      exit status 2.
    """

    runs: Annotated[
        tyro.conf.Positional[tuple[str, ...]],
        tyro.conf.arg(metavar="RUN [RUN ...]", help_behavior_hint=""),
    ]
    """folders of experiments.pretrain."""
    out: Annotated[str, tyro.conf.arg(metavar="FOLDER", help_behavior_hint="")] = ""
    """folder for the files; by default that of the run, if it is only one."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    arguments = tyro.cli(Arguments, prog="python -m experiments.report", args=argv)
    try:
        if not arguments.runs:
            raise ValueError("runs: must be at least one folder, got none.")
        if len(arguments.runs) > 1 and not arguments.out:
            raise ValueError(
                f"--out: must be given for several runs, got {len(arguments.runs)}."
            )
        out = Path(arguments.out or arguments.runs[0])
        written = report([Path(run) for run in arguments.runs], out)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for path in written:
        print(path)
    return 0


def report(folders: Sequence[Path], out: Path) -> list[Path]:
    """Writes the page and the figures of runs, prints their tables; returns the files.

    Raises:
      ValueError: a folder that no run has made, or that holds no step yet.
      OSError: a file cannot be written.
    """
    shown_on = console(140)
    files: dict[str, bytes] = {}
    sections = []
    groups = runs.read(folders)
    for number, group in enumerate(groups, start=1):
        suffix = f"-{number}" if len(groups) > 1 else ""
        rows = standings(group)
        drawn = {
            f"gaps{suffix}.png": ("Losses, and gaps to BF16", figures.overview(group)),
            f"domains{suffix}.png": ("Gaps by domain", figures.of_domains(group)),
        }
        pictures = [
            (text, name, page.png(figure))
            for name, (text, figure) in drawn.items()
            if figure is not None
        ]
        files |= {name: data for _, name, data in pictures}
        shown = [(text, data) for text, _, data in pictures]
        sections.append(page.section(group, rows, shown))
        title = ", ".join(group.names)
        cells = [row.cells for row in rows]
        shown_on.print(tables.terminal(HEADER, cells, title=title, caption=CAPTION))
        shown_on.print(verdict(group, rows))
    title = f"Runs: {', '.join(folder.name for folder in folders)}"
    files["runs.html"] = page.page(title, sections).encode()
    out.mkdir(parents=True, exist_ok=True)
    for name, data in files.items():
        (out / name).write_bytes(data)
    return [out / name for name in files]


if __name__ == "__main__":
    sys.exit(main())
