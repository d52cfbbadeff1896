"""Losses against tokens: smoothed, averaged over seeds, compared with BF16."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

Series = NDArray[np.float64]


class Band(NamedTuple):
    """A mean over seeds, and one sample standard deviation to both sides.

    Attributes:
      tokens: [n], seen until then.
      mean: [n], over the seeds that have come so far.
      spread: [n], NaN where there are fewer than two.
    """

    tokens: Series
    mean: Series
    spread: Series

    @classmethod
    def of(cls, seeds: Sequence[tuple[Series, Series]]) -> "Band":
        """Returns the band of (tokens, values) of each seed; NaN values are left out.

        Seeds need not have values at the same places, nor equally many.
        """
        tokens = np.unique(np.concatenate([places for places, _ in seeds]))
        values = np.full((len(seeds), len(tokens)), np.nan)
        for row, (places, found) in zip(values, seeds, strict=True):
            row[np.searchsorted(tokens, places)] = found
        known = np.isfinite(values)
        count = known.sum(0)
        with np.errstate(invalid="ignore", divide="ignore"):
            mean = np.where(known, values, 0).sum(0) / count
            square = np.where(known, values - mean, 0) ** 2
            spread = np.sqrt(square.sum(0) / np.where(count > 1, count - 1, np.nan))
        return cls(tokens, mean, spread)


def smooth(losses: Sequence[float], weight: float = 0.95) -> Series:
    """Returns the exponential moving average, free of the bias of its start.

    mean_i = sum_{j <= i} weight^(i - j) losses_j / sum_{j <= i} weight^(i - j)

    A loss that is NaN, as of a step that was skipped, has no mean and enters none.
    """
    total = count = 0.0
    means = []
    for loss in losses:
        is_known = bool(np.isfinite(loss))
        if is_known:
            total, count = weight * total + loss, weight * count + 1
        means.append(total / count if is_known else np.nan)
    return np.array(means)


Loss = TypeVar("Loss", float, Series)


def percent_over(loss: Loss, reference: Loss) -> Loss:
    """Returns the gap of a loss, or of each of several, to a reference in percent.

    gap = 100 (loss / reference - 1)
    """
    return 100 * (loss / reference - 1)


def gap(
    losses: Mapping[int, float], reference: Mapping[int, float]
) -> dict[int, float]:
    """Returns `percent_over` at every step that both have."""
    return {
        step: percent_over(loss, reference[step])
        for step, loss in losses.items()
        if step in reference
    }
