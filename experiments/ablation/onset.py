"""When the loss of a run leaves the plateau of early training.

A model that has learned frequencies of tokens stays near 4 nats for a while, then falls
to 3.4 within some hundred steps. Runs that end soon after differ by when that was.
"""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from experiments import study
from experiments.folder import Row, number
from experiments.many_runs.found import loss
from experiments.presets import REFERENCE

LEVEL = 3.6  # nats a token, halfway
_SHOWN = (REFERENCE, "ufp4")
_STYLES = ("-", "--", ":")  # of seeds


def onset(row: Row) -> float | None:
    """Returns the step at which the training loss falls below `LEVEL`, or None.

    Between means over `at_once` steps it is taken to be linear. A mean that is not
    finite is above any level.
    """
    losses = np.nan_to_num(_losses(row), nan=np.inf).tolist()
    after = next((i for i, loss in enumerate(losses) if loss < LEVEL), None)
    if after is None:
        return None
    if after == 0:
        return row["at_once"] / 2
    high, low = losses[after - 1 : after + 1]
    return row["at_once"] * (after + 0.5 - (LEVEL - low) / (high - low))


def _losses(row: Row) -> list[float]:
    return [number(loss) for loss in row["losses"]]


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draws losses over steps, and held-out losses over the onset, into a PNG file.

    Args:
      rows: of one model at one learning rate.
      path: of the file.
    """
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for row in rows:
        if row["policy"] in _SHOWN and row["seed"] == row["noise"]:
            steps = row["at_once"] * (np.arange(len(row["losses"])) + 0.5)
            style = {"color": f"C{_SHOWN.index(row['policy'])}", "lw": 1.2}
            label = f"{row['policy']}, seed {row['seed']}"
            line = _STYLES[row["seed"] % len(_STYLES)]
            left.plot(steps, _losses(row), line, label=label, **style)
    left.axhline(LEVEL, color="black", lw=0.5)
    known = [(row, step) for row in rows if (step := onset(row)) is not None]
    for seed in sorted({row["seed"] for row, _ in known}):
        points = [(step, loss(row)) for row, step in known if row["seed"] == seed]
        right.plot(*zip(*points, strict=True), "o", ms=4, label=f"weights {seed}")
    left.set(xlabel="step", ylabel="training loss, nats/token", ylim=(2.5, 5))
    right.set(
        xlabel=f"step at which the training loss falls below {LEVEL:g}",
        ylabel="held-out loss, nats/token",
    )
    study.save(figure, path, left, right)
