"""Gaps to BF16, seed by seed, and which of them differ by more than seeds do."""

import dataclasses
import math
import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Self

import numpy as np
from scipy import stats

from experiments.folder import Row
from experiments.many_runs.found import loss
from experiments.presets import REFERENCE
from experiments.report.curves import percent_over

_CONFIDENCE = 0.95  # that an interval has the true difference


class Deviation(NamedTuple):
    """A standard deviation.

    Attributes:
      value: of one run.
      freedom: degrees of freedom of the estimate.
    """

    value: float
    freedom: int


class Difference(NamedTuple):
    """Of two gaps, in points.

    Attributes:
      value: positive where the first is larger; NaN where a run diverged.
      margin: half the width of its 95% interval.
    """

    value: float
    margin: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Self:
        """Returns what two or more pairs of runs say.

        mean +- t sqrt(sum (x - mean)^2 / (n (n - 1)))
        """
        error = float(np.std(values, ddof=1)) / math.sqrt(len(values))
        return cls(float(np.mean(values)), _margin(error, len(values) - 1))

    @property
    def word(self) -> str:
        """Whether the first is better or worse, as far as seeds tell."""
        if not math.isfinite(self.value):
            return "diverged"
        if abs(self.value) <= self.margin:
            return "within seeds"
        return "better" if self.value < 0 else "worse"

    def __str__(self) -> str:
        if not math.isfinite(self.value):
            return self.word
        low, high = self.value - self.margin, self.value + self.margin
        return f"{self.value:+.2f} ({low:+.2f} to {high:+.2f}), {self.word}"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gap:
    """The runs of a policy.

    gap = 100 (loss / loss of BF16 with the same seed - 1)

    Attributes:
      policy: its name.
      losses: held-out, of every seed.
      seeds: those of which there is a gap.
      gaps: percent, in high precision; NaN where one of both diverged.
      own_gaps: likewise, with the forward pass of the policy.
      tokens_per_s: the fastest.
      diverged: how many runs did.
    """

    policy: str
    losses: tuple[float, ...]
    seeds: tuple[int, ...]
    gaps: tuple[float, ...]
    own_gaps: tuple[float, ...]
    tokens_per_s: float
    diverged: int

    @property
    def mean(self) -> float:
        """Of the gaps; NaN without any."""
        return statistics.fmean(self.gaps) if self.gaps else math.nan

    def of(self, seed: int) -> float | None:
        """Returns the gap of a seed, or None."""
        return dict(zip(self.seeds, self.gaps, strict=True)).get(seed)


def gaps(rows: Sequence[Row], domain: str = "all") -> list[Gap]:
    """Returns what was found of each policy, in the order of the rows.

    Args:
      rows: of one model and one learning rate.
      domain: of the held-out text.
    """
    reference = {
        row["seed"]: loss(row, domain) for row in rows if row["policy"] == REFERENCE
    }
    by_policy: dict[str, list[Row]] = {}
    for row in rows:
        by_policy.setdefault(row["policy"], []).append(row)

    def of(policy: str, group: Sequence[Row]) -> Gap:
        paired = [row for row in group if row["seed"] in reference]

        def relative(forward: str) -> tuple[float, ...]:
            return tuple(
                percent_over(loss(row, domain, forward), reference[row["seed"]])
                for row in paired
            )

        return Gap(
            policy=policy,
            losses=tuple(loss(row, domain) for row in group),
            seeds=tuple(row["seed"] for row in paired),
            gaps=relative("bf16"),
            own_gaps=relative("own"),
            tokens_per_s=max(row["tokens_per_s"] for row in group),
            diverged=sum(row["diverged"] for row in group),
        )

    return [of(policy, group) for policy, group in by_policy.items()]


def spread(found: Sequence[Gap]) -> Deviation | None:
    """Returns the standard deviation of a gap over seeds, pooled over policies."""
    return pooled(each.gaps for each in found if each.policy != REFERENCE)


def pooled(groups: Iterable[Sequence[float]]) -> Deviation | None:
    """Returns the standard deviation within groups, of their finite values.

    s^2 = sum (x - mean of its group)^2 / sum (size of a group - 1)

    None where no group has two values.
    """
    finite = ([x for x in group if math.isfinite(x)] for group in groups)
    several = [group for group in finite if len(group) > 1]
    if not several:
        return None
    freedom = sum(len(group) - 1 for group in several)
    squares = sum(statistics.variance(g) * (len(g) - 1) for g in several)
    return Deviation(math.sqrt(squares / freedom), freedom)


def differences(a: Gap, b: Gap) -> list[float]:
    """Returns the gap of a less that of b for each seed that both have."""
    of_a = zip(a.seeds, a.gaps, strict=True)
    return [gap - other for seed, gap in of_a if (other := b.of(seed)) is not None]


def difference(a: Gap, b: Gap, deviation: Deviation | None) -> Difference | None:
    """Returns by how much the gap of a is larger than that of b, by Student's t.

    Seed by seed where they share several, since seeds move the losses of all policies
    alike; otherwise between means. None where neither is possible.

    Args:
      a: a policy.
      b: what it is compared with.
      deviation: of one gap over seeds, where fewer than two seeds are shared; None: not
        known.
    """
    if len(of_seeds := differences(a, b)) > 1:
        return Difference.of(of_seeds)
    if deviation is None or not (a.gaps and b.gaps):
        return None
    error = deviation.value * math.sqrt(1 / len(a.gaps) + 1 / len(b.gaps))
    return Difference(a.mean - b.mean, _margin(error, deviation.freedom))


def _margin(error: float, freedom: int) -> float:
    """Returns half the width of the interval around a mean with a standard error."""
    return error * float(stats.t.ppf((1 + _CONFIDENCE) / 2, freedom))
