"""The tables of the README: means over layers, and the standard deviation over them."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.folder import Row
from experiments.operands import cases, figures
from experiments.operands.cases import BLOCKS, BOTH, GRIDS, ROTATIONS, SCALES
from experiments.operands.found import OPERANDS, PRODUCTS, Found
from experiments.report import tables

_CREST_EDGES = (2.0, 2.1, 2.39)  # the last: where the grids meet, arXiv 2510.25602


def draw(rows: Sequence[Row], folder: Path) -> None:
    """Draws the figures into a folder."""
    figures.write(Found(rows), folder)


def parts(rows: Sequence[Row]) -> dict[str, str]:
    """Returns the tables by the names that the README has for them."""
    found = Found(rows)
    made = (rotation, crests, steps, matrices, products, gains, sizes, scales, ahead)
    return {table.__name__: table(found) for table in made}


def rotation(found: Found) -> str:
    """Returns the six operands without and with a rotation of 16, at the last step."""
    header = ["operand", "crest", "kurtosis"]
    header += [f"{grid} {what}" for grid in BOTH for what in ("dB", "change")]
    header += ["UNIFORM ahead", "both turn"]
    lines = []
    for where in OPERANDS:
        line = [" ".join(where)]
        for name in ("crest", "kurtosis"):
            values = (
                found.of(
                    where, name, section="distributions", grid="UNIFORM", rotation=n
                )
                for n in (0, 16)
            )
            line.append(" to ".join(f"{np.median(value):.2f}" for value in values))
        for grid in BOTH:
            gain = found.gain(where, grid=grid)
            line.append(spread(found.of(where, "qsnr", grid=grid)))
            line.append(f"{spread(gain, sign='+')} ({share(gain)})")
        e2m1, uniform = (found.gain(where, grid=grid) for grid in BOTH)
        ahead = " to ".join(str(sum(each > 0)) for each in leads(found, where))
        line += [ahead, str(np.sum((e2m1 < 0) & (uniform > 0)))]
        lines.append(line)
    return tables.markdown(header, lines)


def leads(found: Found, where: tuple[str, str]) -> list[np.ndarray]:
    """Returns `lead` of every layer, without and with a rotation of 16."""
    return [lead(found, where, rotation=rotation) for rotation in (0, 16)]


def lead(found: Found, where: tuple[str, str], **how: Any) -> np.ndarray:
    """Returns by how many dB UNIFORM leads E2M1 in every layer."""
    e2m1, uniform = (found.of(where, "qsnr", grid=grid, **how) for grid in BOTH)
    return uniform - e2m1


def crests(found: Found) -> str:
    """Returns what a rotation of 16 changes by the crest factor before it."""
    header = ["crest", "operands", *(f"{grid} change" for grid in BOTH)]
    header += ["E2M1 falls", "UNIFORM rises", "UNIFORM ahead"]
    crest = over(found, OPERANDS, "crest", section="distributions", grid="UNIFORM")
    e2m1, uniform = (
        np.concatenate([found.gain(where, grid=grid) for where in OPERANDS])
        for grid in BOTH
    )
    lead = [
        np.concatenate(each)
        for each in zip(*(leads(found, w) for w in OPERANDS), strict=True)
    ]
    lines = []
    for low, high in itertools.pairwise((0, *_CREST_EDGES, np.inf)):
        chosen = (low <= crest) & (crest < high)
        if not chosen.any():
            continue
        ahead = " to ".join(str(np.sum(each[chosen] > 0)) for each in lead)
        changes = (spread(each[chosen], sign="+") for each in (e2m1, uniform))
        counts = np.sum(e2m1[chosen] < 0), np.sum(uniform[chosen] > 0)
        cells = (*changes, *map(str, counts), ahead)
        lines.append([f"{low:g} to {high:g}", str(chosen.sum()), *cells])
    return tables.markdown(header, lines)


def steps(found: Found) -> str:
    """Returns the change under a rotation of 16 over training, by operand."""
    header = ["operand"]
    header += [f"{grid}, step {step}" for grid in BOTH for step in found.steps]
    lines = [
        [
            " ".join(where),
            *(
                spread(found.gain(where, grid=grid, step=step), sign="+")
                for grid in BOTH
                for step in found.steps
            ),
        ]
        for where in OPERANDS
    ]
    return tables.markdown(header, lines)


def matrices(found: Found) -> str:
    """Returns the x of fprop by kind of layer, at the last step."""
    where = ("fprop", "x")
    kinds = [path.split("/", 2)[2] for path in found.layers]
    header = ["layer", "crest"]
    header += [f"{grid} {what}" for grid in BOTH for what in ("dB", "change", "B_eff")]
    crest = found.of(where, "crest", section="distributions", grid="UNIFORM")
    lines = []
    for kind in dict.fromkeys(kinds):
        of_kind = np.array([each == kind for each in kinds])
        line = [kind, spread(crest[of_kind])]
        for grid in BOTH:
            use = [found.of(where, "b_eff", grid=grid, rotation=n) for n in (0, 16)]
            line += [
                spread(found.of(where, "qsnr", grid=grid)[of_kind]),
                spread(found.gain(where, grid=grid)[of_kind], sign="+"),
                " to ".join(f"{each[of_kind].mean():.2f}" for each in use),
            ]
        lines.append(line)
    return tables.markdown(header, lines)


def products(found: Found) -> str:
    """Returns the products without and with a rotation of 16, at the last step."""
    header = ["grid", "rotation"]
    header += [
        f"{name} {what}" for _, name in PRODUCTS for what in ("dB", "eta - 1, %")
    ]
    lines = []
    for grid in GRIDS:
        for n in (0, 16):
            line = [grid, _size(n)]
            for where in PRODUCTS:
                line.append(spread(found.of(where, "qsnr", grid=grid, rotation=n)))
                eta = found.of(where, "eta - 1", grid=grid, rotation=n)
                line.append(spread(eta, sign="+"))
            lines.append(line)
    return tables.markdown(header, lines)


def gains(found: Found) -> str:
    """Returns what a rotation and the uniform grid gain in the products."""
    header = ["product", *(f"{grid}: RHT 16 over none" for grid in BOTH)]
    header += ["UNIFORM, RHT 16 over E2M1, none"]
    lines = []
    for where in PRODUCTS:
        plain = found.of(where, "qsnr", grid="E2M1")
        rotated = found.of(where, "qsnr", grid="UNIFORM", rotation=16)
        changes = [*(found.gain(where, grid=grid) for grid in BOTH), rotated - plain]
        cells = (f"{spread(each, sign='+')} ({share(each)})" for each in changes)
        lines.append([where[1], *cells])
    return tables.markdown(header, lines)


def sizes(found: Found) -> str:
    """Returns all operands and products by the size of the rotation."""
    header = ["grid", "rotation", "operands, dB", "alpha - 1, %", "B_eff"]
    header += ["products, dB", "eta - 1, %"]
    lines = []
    for grid in GRIDS:
        for n in ROTATIONS:
            if not found.has(grid=grid, rotation=n):
                continue
            how = {"grid": grid, "rotation": n}
            lines.append(
                [
                    grid,
                    _size(n),
                    spread(over(found, OPERANDS, "qsnr", **how)),
                    spread(over(found, OPERANDS, "alpha - 1", **how), sign="+"),
                    spread(over(found, OPERANDS, "b_eff", **how)),
                    spread(over(found, PRODUCTS, "qsnr", **how)),
                    spread(over(found, PRODUCTS, "eta - 1", **how), sign="+"),
                ]
            )
    return tables.markdown(header, lines)


def scales(found: Found) -> str:
    """Returns operands by scale format and block, gradients apart from the others."""
    parts = {
        "x, w": [where for where in OPERANDS if where[1] != "dy"],
        "dy": [where for where in OPERANDS if where[1] == "dy"],
    }
    columns = list(itertools.product(BOTH, parts, (0, 16)))
    header = ["scale", "block", *(f"{g} {part}, {_size(n)}" for g, part, n in columns)]
    lines = []
    for scale, block in itertools.product(SCALES, BLOCKS):
        line = []
        for grid, part, n in columns:
            how = cases.case(grid, n, scale, block)
            known = found.has(**how)
            line.append(
                spread(over(found, parts[part], "qsnr", **how)) if known else ""
            )
        if any(line):
            lines.append([scale, str(block), *line])
    return tables.markdown(header, lines)


def ahead(found: Found) -> str:
    """Returns by how much UNIFORM leads E2M1 over all operands, by scale and block."""
    sizes = (0, 16, 128)
    lines = []
    for scale, block in itertools.product(SCALES, BLOCKS):
        line = []
        for n in sizes:
            how = {"rotation": n, "scale": scale, "block": block}
            if all(found.has(grid=grid, **how) for grid in BOTH):
                gap = np.concatenate([lead(found, w, **how) for w in OPERANDS])
                line.append(f"{spread(gap, sign='+')} ({np.sum(gap > 0)})")
            else:
                line.append("")
        if any(line):
            lines.append([scale, str(block), *line])
    return tables.markdown(["scale", "block", *map(_size, sizes)], lines)


def over(
    found: Found, places: Sequence[tuple[str, str]], name: str, **quantizer
) -> np.ndarray:
    """Returns a figure of every layer in several places."""
    return np.concatenate([found.of(where, name, **quantizer) for where in places])


def spread(values: np.ndarray, *, sign: str = "") -> str:
    """Returns the mean and the standard deviation."""
    return f"{np.mean(values):{sign}.2f} +- {np.std(values):.2f}"


def share(values: np.ndarray) -> str:
    """Returns how many of the values are positive."""
    return f"{np.sum(values > 0)} of {len(values)} rise"


def _size(rotation: int) -> str:
    return f"RHT {rotation}" if rotation else "none"
