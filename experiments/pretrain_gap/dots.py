"""The gap to BF16 of every run, as dots."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from experiments import study
from experiments.folder import Row
from experiments.many_runs.gaps import gaps
from experiments.presets import REFERENCE


def draw(by_model: Mapping[str, Sequence[Row]], path: Path) -> None:
    """Draws a line for each policy, a dot for each seed, and their mean as a stroke.

    The best is on top, and at the bottom what has no mean, as a run of it diverged.

    Args:
      by_model: the rows of each model, a panel each.
      path: of the PNG file.
    """
    drawn = {
        model: [each for each in gaps(rows) if each.policy != REFERENCE and each.gaps]
        for model, rows in by_model.items()
    }
    drawn = {model: found for model, found in drawn.items() if found}
    if not drawn:
        return
    figure = Figure(figsize=(5 * len(drawn), 3.2), layout="constrained")
    panels = figure.subplots(1, len(drawn), squeeze=False)[0]
    for axes, (model, found) in zip(panels, drawn.items(), strict=True):
        found = sorted(found, key=lambda each: -np.nan_to_num(each.mean, nan=np.inf))
        for line, each in enumerate(found):
            axes.plot(each.gaps, [line] * len(each.gaps), "C0o", ms=4)
            axes.plot(each.mean, line, "C0|", ms=14)
        axes.set_yticks(range(len(found)), [each.policy for each in found])
        axes.set(xlabel="gap to BF16, % of held-out loss", title=model)
        axes.set_xlim(left=min(0, axes.get_xlim()[0]))
        axes.grid(axis="x", lw=0.4)
    study.save(figure, path, *panels)
