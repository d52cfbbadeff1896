"""How the rows are shown: tables, a verdict, JSON lines and a figure."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.table import Table

from experiments.shrinkage.cases import GRIDS
from experiments.shrinkage.study import Row
from experiments.study import save
from fp4jax.numerics import E2M1

_TITLES = {
    "data": "Distributions: blocks of 16, F32 scales, nearest",
    "scales": "Scale formats: a Gaussian, nearest",
    "stochastic": "Scale formats: a Gaussian, stochastic rounding",
    "views": "A matrix and its transpose, rows and squares",
    "gemm": "A GEMM of Gaussians",
}
_DIGITS = {"view error": 3, "output error": 3, "scale differs": 1, "value differs": 1}


def record(row: Row) -> dict[str, Any]:
    """Returns a row as JSON has it."""
    case = row.case
    return {
        "section": case.section,
        "data": case.data,
        "label": case.label,
        "grid": case.grid,
        "figures": {name: round(value, 5) for name, value in row.figures.items()},
        "expected": dict(case.expected),
        "off": {name: round(value, 5) for name, value in row.off.items()},
        "bin_error": [round(error, 5) for error in row.bin_error],
    }


def tables(rows: Sequence[Row]) -> list[Table]:
    """Returns a table for each section; an asterisk marks what is beyond tolerance."""
    found = []
    for section, group in itertools.groupby(rows, lambda row: row.case.section):
        group = list(group)
        table = Table("data", "quantizer", "grid", title=_TITLES[section])
        for name in group[0].figures:
            table.add_column(name, justify="right")
        for row in group:
            case = row.case
            cells = (_cell(row, name) for name in row.figures)
            table.add_row(case.data, case.label, case.grid, *cells)
        found.append(table)
    return found


def verdict(rows: Sequence[Row]) -> str:
    """Returns how many figures lie within their tolerance, and which do not."""
    total = sum(len(row.case.expected) for row in rows)
    off = [
        f"{row.case.data}, {row.case.label}, {row.case.grid}: {name} by {miss:+.3f}"
        for row in rows
        for name, miss in row.off.items()
    ]
    return "\n".join([f"{total - len(off)} of {total} figures as expected.", *off])


def _cell(row: Row, name: str) -> str:
    digits = _DIGITS.get(name, 2)
    text = f"{row.figures[name]:.{digits}f}"
    if name in row.case.expected:
        text += f" ({row.case.expected[name]:.{digits}f})"
    return text + "*" * (name in row.off)


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draws shrinkage and QSNR of every distribution, and the error of each bin."""
    rows = [row for row in rows if row.case.section == "data"]
    figure = Figure(figsize=(12, 4), layout="constrained")
    shrinkage, qsnr, bins = figure.subplots(1, 3, width_ratios=(1, 1, 0.9))
    names = list(dict.fromkeys(f"{r.case.data} {r.case.label}" for r in rows))
    for grid, marker in zip(GRIDS, ("o", "s"), strict=True):
        chosen = [row for row in rows if row.case.grid == grid]
        for axes, name in ((shrinkage, "alpha - 1"), (qsnr, "QSNR")):
            values = [row.figures[name] for row in chosen]
            label = grid if axes is qsnr else None
            axes.plot(values, range(len(names)), marker, label=label)
    for axes in (shrinkage, qsnr):
        axes.set_yticks(range(len(names)), names)
        axes.invert_yaxis()
        axes.grid(axis="y", linewidth=0.3)
    qsnr.set_yticklabels([])
    shrinkage.axvline(0, color="black", linewidth=0.8)
    shrinkage.set_xlabel("alpha - 1, % (below 0: shrinks)")
    qsnr.set_xlabel("QSNR, dB")
    gauss = next(r for r in rows if r.case.data == "gauss" and r.case.grid == "E2M1")
    labels = [f"{magnitude:g}" for magnitude in E2M1.magnitudes]
    bins.bar(labels, gauss.bin_error)
    bins.axhline(0, color="black", linewidth=0.8)
    bins.set(xlabel="magnitude of E2M1", ylabel="mean error of the bin, gauss plain")
    qsnr.legend(frameon=False, loc="upper right")
    save(figure, path, shrinkage, qsnr, bins)
