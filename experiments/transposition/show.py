"""The tables of the README and the figure: means over layers, and their deviation."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure

from experiments import study
from experiments.folder import Row
from experiments.operands.cases import BOTH
from experiments.operands.show import spread
from experiments.report import tables
from experiments.transposition.measure import BLOCKS, SCALE_NAMES, TENSORS

_COLORS = {"1-D": "C0", "2-D": "C3"}
_STYLES = dict(zip(SCALE_NAMES, ("-", "--", ":", "-."), strict=True))
_ERRORS = list(itertools.product(("products", "gradients"), ("dx", "dw")))


def draw(rows: Sequence[Row], folder: Path) -> None:
    """Draws the figure into a folder."""
    plot(last(rows), folder / "blocks.png")


def parts(rows: Sequence[Row]) -> dict[str, str]:
    """Returns the tables by the names that the README has for them."""
    found = {table.__name__: table(last(rows)) for table in (mismatch, cost, gradients)}
    return {**found, "steps": steps(rows)}


def last(rows: Sequence[Row]) -> list[Row]:
    """Returns the rows of the last step."""
    return study.matching(rows, step=max(row["step"] for row in rows))


def mismatch(rows: Sequence[Row]) -> str:
    """Returns how much rows and columns of 1-D blocks differ, over all tensors."""
    header = ["scale", "block"]
    for grid in BOTH:
        header += [
            f"{grid} scale differs, %",
            "octaves",
            "value differs, %",
            "views, %",
        ]
    lines = [
        _named(case)
        + [
            spread(values(found, "tensors", TENSORS, name))
            for found in case
            for name in ("scale differs", "octaves", "value differs", "views")
        ]
        for case in _cases(rows)
    ]
    return tables.markdown(header, lines)


def cost(rows: Sequence[Row]) -> str:
    """Returns the QSNR of 1-D blocks, and what squares take of it, by tensor."""
    header = ["scale", "block"]
    header += [f"{grid} {name}" for grid in BOTH for name in TENSORS]
    lines = []
    for case in _cases(rows):
        line = _named(case)
        for found in case:
            for name in TENSORS:
                one, two = qsnr(found, [name])
                line.append(f"{one.mean():.2f}, {spread(two - one, sign='+')}")
        lines.append(line)
    return tables.markdown(header, lines)


def gradients(rows: Sequence[Row]) -> str:
    """Returns errors of gradients in percent, 1-D and 2-D, beside both references."""
    header = ["scale", "block", "grid"]
    header += [f"{name} {of}" for of in ("", "of fprop") for name in ("dx", "dw")]
    header = [name.strip() for name in header]
    lines = []
    for case in _cases(rows):
        for found in case:
            pairs = (_pair(*errors(found, *each)) for each in _ERRORS)
            lines.append([*_named([found]), found["grid"], *pairs])
    return tables.markdown(header, lines)


def steps(rows: Sequence[Row]) -> str:
    """Returns over training, at a block of 32, by how much squares change an error."""
    header = ["scale", "grid", "step", "QSNR, dB", "dx", "dw", "dx of fprop"]
    header += ["dw of fprop"]
    lines = []
    for row in sorted(rows, key=lambda row: (row["scale"], row["grid"], row["step"])):
        if row["block"] != 32:
            continue
        pairs = (qsnr(row, TENSORS), *(errors(row, *each) for each in _ERRORS))
        cells = (spread(two - one, sign="+") for one, two in pairs)
        lines.append([row["scale"], row["grid"], str(row["step"]), *cells])
    return tables.markdown(header, lines)


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draws errors of gradients over the size of blocks."""
    figure = Figure(figsize=(13, 6.5), layout="constrained")
    panels = figure.subplots(2, 4, sharex=True, sharey="row")
    for line, grid in zip(panels, BOTH, strict=True):
        for axes, (section, name) in zip(line, _ERRORS, strict=True):
            for scale, style in _STYLES.items():
                for shape, color in _COLORS.items():
                    chosen = [row for b in BLOCKS for row in _of(rows, grid, scale, b)]
                    if not chosen:
                        continue
                    mean = [values(r, section, [shape], name).mean() for r in chosen]
                    blocks = [row["block"] for row in chosen]
                    label = f"{shape}, {scale}"
                    axes.plot(blocks, mean, style, color=color, label=label)
            of = " beside that of fprop" if section == "gradients" else ""
            axes.set(title=f"{grid}: {name}{of}")
        line[0].set(ylabel="error, % of the norm")
        for axes in line[1:]:
            axes.legend([], frameon=False)
    for axes in panels[1]:
        axes.set_xscale("log", base=2)
        axes.set_xticks(BLOCKS, [str(block) for block in BLOCKS])
        axes.set(xlabel="block")
    study.save(figure, path, *panels.ravel())


def qsnr(row: Row, names: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
    """Returns that of 1-D blocks, the mean of both views, and that of 2-D blocks."""
    rows, columns, squares = (
        values(row, "tensors", names, view) for view in ("rows", "columns", "squares")
    )
    return (rows + columns) / 2, squares


def errors(row: Row, section: str, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns those of a gradient under 1-D blocks and under 2-D blocks."""
    one, two = (values(row, section, [blocks], name) for blocks in ("1-D", "2-D"))
    return one, two


def values(row: Row, section: str, names: Sequence[str], figure: str) -> np.ndarray:
    """Returns a figure of all layers, of several tensors or shapes of blocks."""
    found: Any = [row[section][name][figure] for name in names]
    return np.array(found, np.float64).ravel()


def _cases(rows: Sequence[Row]) -> list[list[Row]]:
    """Returns the rows of both grids, by scale and block."""
    found = [
        [row for grid in BOTH for row in _of(rows, grid, scale, block)]
        for scale in SCALE_NAMES
        for block in BLOCKS
    ]
    return [case for case in found if case]


def _of(rows: Sequence[Row], grid: str, scale: str, block: int) -> list[Row]:
    return study.matching(rows, grid=grid, scale=scale, block=block)


def _named(case: Sequence[Row]) -> list[str]:
    return [case[0]["scale"], str(case[0]["block"])]


def _pair(one: np.ndarray, two: np.ndarray) -> str:
    """Returns both means, and in how many layers the second is lower."""
    return f"{one.mean():.2f} to {two.mean():.2f} ({np.sum(two < one)} of {len(one)})"
