"""Training losses of runs over tokens, and their gaps to BF16."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure
from numpy.typing import NDArray

from experiments import study
from experiments.folder import Row
from experiments.presets import REFERENCE

_SMOOTHED = 5  # means of losses
_SETTLED = 0.2  # of a run: what comes before is not shown


def curves(rows: Sequence[Row]) -> dict[str, NDArray]:
    """Returns the training losses of each policy, means over its seeds and smoothed."""
    by_policy: dict[str, list[list[float]]] = {}
    for row in rows:
        by_policy.setdefault(row["policy"], []).append(row["losses"])
    window = np.ones(_SMOOTHED) / _SMOOTHED
    found = {}
    for policy, losses in by_policy.items():
        shortest = min(map(len, losses))
        mean = np.mean([x[:shortest] for x in losses], axis=0, dtype=float)
        found[policy] = np.convolve(mean, window[:shortest], mode="valid")
    return found


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draws both into a PNG file.

    Args:
      rows: of one model.
      path: of the file.
    """
    figure = Figure(figsize=(10, 4), layout="constrained")
    losses, gaps = figure.subplots(1, 2)
    found, row = curves(rows), rows[0]
    each = row["at_once"] * row["rows"] * row["length"] / 1e6
    for policy, curve in found.items():
        tokens = each * (np.arange(len(curve)) + min(_SMOOTHED, len(curve)))
        first = int(_SETTLED * len(curve))
        line = losses.plot(tokens[first:], curve[first:], label=policy, lw=1.2)[0]
        if policy != REFERENCE and REFERENCE in found:
            both = min(len(curve), len(found[REFERENCE]))
            gap = 100 * (curve[:both] / found[REFERENCE][:both] - 1)
            x = tokens[first:both]
            gaps.plot(x, gap[first:], label=policy, color=line.get_color(), lw=1.2)
    losses.set(xlabel="million tokens", ylabel="training loss, nats/token")
    gaps.set(xlabel="million tokens", ylabel="gap to BF16, % (positive: worse)")
    gaps.axhline(0, color="black", lw=0.8)
    study.save(figure, path, losses, gaps)
