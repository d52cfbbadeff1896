"""Gaps to BF16, seed by seed, and which of them differ by more than seeds do."""

import dataclasses
import math
import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from scipy import stats

from experiments.folder import Row
from experiments.many_runs.found import loss
from experiments.presets import REFERENCE

_CONFIDENCE = 0.95  # that a difference is none of seeds


class Deviation(NamedTuple):
    """A standard deviation.

    Attributes:
      value: of one run.
      freedom: degrees of freedom of the estimate.
    """

    value: float
    freedom: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gap:
    """The runs of a policy.

    gap = 100 (loss / loss of BF16 with the same seed - 1)

    Attributes:
      policy: its name.
      losses: held-out, of every seed.
      gaps: percent, in high precision; NaN where one of both diverged.
      own_gaps: likewise, with the forward pass of the policy.
      tokens_per_s: the fastest.
      diverged: how many runs did.
    """

    policy: str
    losses: tuple[float, ...]
    gaps: tuple[float, ...]
    own_gaps: tuple[float, ...]
    tokens_per_s: float
    diverged: int

    @property
    def mean(self) -> float:
        """Of the gaps; NaN without any."""
        return statistics.fmean(self.gaps) if self.gaps else math.nan


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
                100 * (loss(row, domain, forward) / reference[row["seed"]] - 1)
                for row in paired
            )

        return Gap(
            policy=policy,
            losses=tuple(loss(row, domain) for row in group),
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


def verdict(a: Gap, b: Gap, deviation: Deviation | None) -> str:
    """Returns whether a is better or worse than b: Student's t at 95%, two-sided.

    The deviation is that of both where each has several seeds, as some policies spread
    far more than others.

    Args:
      a: a policy.
      b: what it is compared with.
      deviation: of one gap over seeds, where one of both has a single one; None: not
        known.
    """
    if min(len(a.gaps), len(b.gaps)) > 1:
        deviation = pooled((a.gaps, b.gaps))
    if deviation is None or not (a.gaps and b.gaps):
        return "not known"
    error = deviation.value * math.sqrt(1 / len(a.gaps) + 1 / len(b.gaps))
    errors = stats.t.ppf((1 + _CONFIDENCE) / 2, deviation.freedom)
    difference = a.mean - b.mean
    if not math.isfinite(difference):
        return "diverged"
    if abs(difference) <= errors * error:
        return "within seeds"
    return "better" if difference < 0 else "worse"
