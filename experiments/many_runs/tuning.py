"""The learning rate of a model: that of the least held-out loss in BF16."""

import dataclasses
import math
from collections.abc import Sequence

from experiments.many_runs.found import Found, loss
from experiments.many_runs.run import Run
from experiments.many_runs.shapes import TRAINING

RATES = (1e-3, 2e-3, 4e-3, 8e-3)
MOST = 64e-3


def tuning(found: Found, model: str) -> list[Run]:
    """Returns BF16 at every rate, for a part of the model's tokens.

    As long as the largest rate is the best, twice that is one more, up to `MOST`.
    """
    whole = Run.whole(model, RATES[0])
    part = dataclasses.replace(whole, tokens=int(TRAINING[model].tried * whole.tokens))
    runs = [dataclasses.replace(part, lr=rate) for rate in RATES]
    while _best(found, runs) == runs[-1].lr < MOST:
        runs.append(dataclasses.replace(part, lr=2 * runs[-1].lr))
    return runs


def tuned(found: Found, model: str, *, assumed: float | None = None) -> Run | None:
    """Returns BF16 at the best rate, for all tokens; None before that rate is known.

    Args:
      found: so far.
      model: whose.
      assumed: the rate where the best one is not known.
    """
    rate = _best(found, tuning(found, model)) or assumed
    return None if rate is None else Run.whole(model, rate)


def _best(found: Found, runs: Sequence[Run]) -> float | None:
    """Returns the best rate of runs that did not diverge; None before all are there."""
    losses = {row["lr"]: loss(row) for row in found.rows_of(runs)}
    finite = [rate for rate, value in losses.items() if math.isfinite(value)]
    if len(losses) < len(runs) or not finite:
        return None
    return min(finite, key=lambda rate: losses[rate])
