"""Training losses of runs over tokens, and their gaps to BF16."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from experiments import study
from experiments.folder import Row, number
from experiments.presets import REFERENCE
from experiments.report.curves import percent_over

_SMOOTHED = 5  # means of losses, or as many as there are
_SETTLED = 0.2  # of a run: what comes before is not shown


class Curve(NamedTuple):
    """Training losses, means over seeds and smoothed.

    Attributes:
      ends: how many losses of a run each value comes after.
      values: in nats a token; NaN where a run diverged.
    """

    ends: NDArray
    values: NDArray


def curves(rows: Sequence[Row]) -> dict[str, Curve]:
    """Returns the training losses of each policy."""
    by_policy: dict[str, list[list[float]]] = {}
    for row in rows:
        by_policy.setdefault(row["policy"], []).append(list(map(number, row["losses"])))
    found = {}
    for policy, losses in by_policy.items():
        shortest = min(map(len, losses))
        mean = np.mean([x[:shortest] for x in losses], axis=0)
        size = min(_SMOOTHED, shortest)
        smooth = np.convolve(mean, np.full(size, 1 / size), mode="valid")
        found[policy] = Curve(np.arange(size, shortest + 1), smooth)
    return found


def draw(rows: Sequence[Row], path: Path, *, policies: Sequence[str]) -> None:
    """Draws both into a PNG file, with one legend: what ends highest comes first.

    Args:
      rows: of one model.
      path: of the file.
      policies: of the study, which have the colors of their places in all figures.
    """
    figure = Figure(figsize=(11, 4), layout="constrained")
    losses, gaps = figure.subplots(1, 2)
    found, row = curves(rows), rows[0]
    each = row["at_once"] * row["rows"] * row["length"] / 1e6
    lines = {}
    for policy, (ends, values) in found.items():
        tokens, first = each * ends, int(_SETTLED * len(values))
        style = {"color": f"C{policies.index(policy)}", "lw": 1.2}
        (lines[policy],) = losses.plot(tokens[first:], values[first:], **style)
        if policy != REFERENCE and REFERENCE in found:
            reference = found[REFERENCE].values
            both = min(len(values), len(reference))
            gap = percent_over(values[:both], reference[:both])
            gaps.plot(tokens[first:both], gap[first:], **style)
    losses.set(xlabel="million tokens", ylabel="training loss, nats/token")
    gaps.set(xlabel="million tokens", ylabel="gap to BF16, % (positive: worse)")
    gaps.axhline(0, color="black", lw=0.8)
    # The order of losses is that of gaps; what diverged has none, and is the worst.
    last = {policy: curve.values[-1] for policy, curve in found.items()}
    order = sorted(lines, key=lambda policy: -np.nan_to_num(last[policy], nan=np.inf))
    figure.legend(
        [lines[policy] for policy in order],
        order,
        loc="outside right center",
        frameon=False,
    )
    study.save(figure, path, losses, gaps)
