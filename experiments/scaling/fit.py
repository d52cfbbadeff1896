"""Losses as a power of compute, and how sure the fit is.

L(C) = E + a (C / C_0)^-b,  C_0 = 10^16 FLOPs
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import optimize

from experiments.many_runs.gaps import Deviation, pooled

UNIT = 1e16  # FLOPs
_POWERS = (1e-3, 1.5)
_DRAWS = 1000
_INSIDE = 95.0  # percent, of an interval


class Point(NamedTuple):
    """A run: its FLOPs and what was found."""

    flops: float
    value: float


class Law(NamedTuple):
    """The coefficients of L(C)."""

    floor: float
    factor: float
    power: float

    def __call__(self, flops: float | NDArray) -> float | NDArray:
        """Returns the loss at some compute."""
        return self.floor + self.factor * (np.asarray(flops) / UNIT) ** -self.power


class Interval(NamedTuple):
    """A number and the ends of its 95% interval."""

    value: float
    low: float
    high: float


def law(points: Sequence[Point]) -> Law:
    """Returns the coefficients of least squares, E and a not negative.

    Raises:
      ValueError: fewer than 3 different computes.
    """
    flops, losses = _arrays(points, "law", least=3)

    def of(power: float) -> tuple[NDArray, float]:
        terms = np.stack([np.ones_like(flops), (flops / UNIT) ** -power], axis=1)
        return optimize.nnls(terms, losses)

    # For a power the rest is linear.
    best = optimize.minimize_scalar(
        lambda power: of(power)[1], bounds=_POWERS, method="bounded"
    )
    floor, factor = of(best.x)[0]
    return Law(float(floor), float(factor), float(best.x))


def slope(points: Sequence[Point]) -> float:
    """Returns by how much a value changes with a tenfold compute, by least squares.

    Raises:
      ValueError: fewer than 2 different computes.
    """
    flops, values = _arrays(points, "slope", least=2)
    return float(np.polyfit(np.log10(flops), values, 1)[0])


def _arrays(
    points: Sequence[Point], function: str, *, least: int
) -> tuple[NDArray, NDArray]:
    """Returns FLOPs and values, of so many different computes at least."""
    flops, values = (np.array(x, float) for x in zip(*points, strict=True))
    if (count := len(set(flops))) < least:
        raise ValueError(
            f"{function}: points must have at least {least} different computes, got "
            f"{count}. Add runs of other sizes."
        )
    return flops, values


def deviation(points: Sequence[Point]) -> Deviation | None:
    """Returns the standard deviation over seeds, pooled over computes, or None."""
    by_flops: dict[float, list[float]] = {}
    for point in points:
        by_flops.setdefault(point.flops, []).append(point.value)
    return pooled(by_flops.values())


def intervals(
    function: Callable[[Sequence[Point]], Sequence[float]],
    points: Sequence[Point],
    *,
    noise: Deviation | None,
    seed: int = 0,
) -> list[Interval]:
    """Returns numbers made of points, and what they are where noise moves the points.

    For a slope these are the intervals of Student's t: each draw also draws how large
    the noise is, since the deviation itself is an estimate.

    Args:
      function: of points.
      points: as they were found.
      noise: of a value over seeds; None: no interval is known.
      seed: of the draws.
    """
    found = function(points)
    if noise is None:
        return [Interval(value, math.nan, math.nan) for value in found]
    rng = np.random.default_rng(seed)
    drawn = []
    for _ in range(_DRAWS):
        size = noise.value * math.sqrt(noise.freedom / rng.chisquare(noise.freedom))
        drawn.append(
            function([p._replace(value=p.value + rng.normal(0, size)) for p in points])
        )
    ends = np.percentile(drawn, [(100 - _INSIDE) / 2, (100 + _INSIDE) / 2], axis=0)
    return [
        Interval(value, float(low), float(high))
        for value, low, high in zip(found, *ends, strict=True)
    ]


def seeds_needed(difference: float, noise: float | None) -> int | None:
    """Returns how many seeds of each of two policies tell their gaps apart.

    n = ceil(2 (2 noise / difference)^2): two standard errors of the difference.
    """
    if noise is None or not difference or not math.isfinite(difference):
        return None
    return max(2, math.ceil(2 * (2 * noise / difference) ** 2))
