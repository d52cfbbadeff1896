"""The figures: operands and products over depth, and what a rotation changes."""

import itertools
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments.operands.cases import BOTH
from experiments.operands.found import OPERANDS, PRODUCTS, Found
from experiments.study import save
from fp4jax import stats

_COLORS = {"E2M1": "C0", "UNIFORM": "C1"}
_STYLES = {0: "-", 16: "--"}


def write(found: Found, folder: Path) -> None:
    """Draws all figures into a folder."""
    depth(found, folder / "depth.png")
    shrinkage(found, folder / "shrinkage.png")
    change(found, folder / "change.png")


def depth(found: Found, path: Path) -> None:
    """Draws the QSNR of the operands over depth; bands are the layers of a block."""
    figure = Figure(figsize=(12, 6.5), layout="constrained")
    panels = figure.subplots(2, 3, sharex=True).ravel()
    order = [OPERANDS[i] for i in (0, 2, 4, 1, 3, 5)]
    for axes, where in zip(panels, order, strict=True):
        _draw(axes, found, where, "qsnr")
        axes.set(title=" ".join(where))
    panels[0].set(ylabel="QSNR, dB")
    panels[3].set(ylabel="QSNR, dB")
    for axes in panels[3:]:
        axes.set(xlabel="block")
    for axes in panels[1:]:
        axes.legend([], frameon=False)
    save(figure, path, *panels)


def shrinkage(found: Found, path: Path) -> None:
    """Draws eta - 1 of the products over depth, and the product of those of y."""
    figure = Figure(figsize=(14, 3.8), layout="constrained")
    panels = figure.subplots(1, 4)
    for axes in panels[1:3]:
        axes.sharey(panels[0])
    for axes, where in zip(panels, PRODUCTS, strict=False):
        _draw(axes, found, where, "eta - 1")
        axes.axhline(0, color="black", linewidth=0.8)
        axes.set(title=f"{where[0]} {where[1]}", xlabel="block")
    for grid in BOTH:
        for rotation, style in _STYLES.items():
            eta = found.of(PRODUCTS[0], "eta - 1", grid=grid, rotation=rotation)
            whole = stats.cumulative_shrinkage(jnp.asarray(1 + eta / 100)).product
            panels[3].plot(whole, color=_COLORS[grid], linestyle=style, linewidth=1.3)
    panels[3].set(title="product of eta of y so far", xlabel="layer")
    panels[0].set(ylabel="eta - 1, %")
    for axes in panels[1:]:
        axes.legend([], frameon=False)
    save(figure, path, *panels)


def change(found: Found, path: Path) -> None:
    """Draws what a rotation changes against the crest factor before it."""
    figure = Figure(figsize=(11, 4), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, grid in zip(panels, BOTH, strict=True):
        for i, where in enumerate(OPERANDS):
            crest = found.of(where, "crest", section="distributions", grid="UNIFORM")
            gain = found.gain(where, grid=grid)
            label = " ".join(where)
            axes.plot(crest, gain, ".", color=f"C{i}", label=label, markersize=5)
        axes.axhline(0, color="black", linewidth=0.8)
        axes.set(title=grid, xlabel="crest factor of a block, median, before")
    panels[0].set(ylabel="QSNR with RHT 16, minus without, dB")
    panels[1].legend([], frameon=False)
    save(figure, path, *panels)


def _draw(axes: Axes, found: Found, where: tuple[str, str], name: str) -> None:
    """Draws the mean of the layers of each block, and how far they are apart.

    Of both grids, without and with a rotation.
    """
    blocks = np.unique(found.depth)
    for grid, (rotation, style) in itertools.product(BOTH, _STYLES.items()):
        values = found.of(where, name, grid=grid, rotation=rotation)
        parts = [values[found.depth == block] for block in blocks]
        how: dict[str, Any] = {"color": _COLORS[grid], "linestyle": style}
        how["label"] = f"{grid}, RHT {rotation}" if rotation else grid
        axes.plot(blocks, [part.mean() for part in parts], linewidth=1.3, **how)
        edges = [part.min() for part in parts], [part.max() for part in parts]
        axes.fill_between(blocks, *edges, color=_COLORS[grid], alpha=0.08, linewidth=0)
