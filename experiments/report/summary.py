"""What a comparison found: its rows and its verdict."""

import dataclasses
import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import numpy as np

from experiments.presets import CONTROL, REFERENCE
from experiments.report.curves import percent_over
from experiments.report.tables import percent

T = TypeVar("T", bound="Baseline")

# The control counts as plainly worse from this many times the largest other gap on.
PLAINLY = 2.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Baseline:
    """A model fitted on the tokens of one run, by its loss on the held-out text.

    Attributes:
      seed: what it shares with the runs on the same batches.
      heldout_loss: nats per token; NaN if it diverged.
      bits_per_byte: the same loss per byte of text.
    """

    name: str
    seed: int
    heldout_loss: float
    bits_per_byte: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial(Baseline):
    """One run of a policy.

    Attributes:
      losses: training loss of every step; NaN where it was skipped.
      tokens_per_s: without compilation; None for a single step.
    """

    losses: tuple[float, ...]
    tokens_per_s: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class BaselineRow:
    """The fits of one order: means over seeds, and a sample standard deviation.

    Attributes:
      heldout_spread: None for a single seed, and where a loss is not finite.
    """

    name: str
    heldout_loss: float
    heldout_spread: float | None
    bits_per_byte: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row(BaselineRow):
    """The trials of one policy, likewise.

    gap = 100 (heldout_loss / heldout_loss of BF16 - 1), seed by seed

    Attributes:
      train_loss: mean of the last steps; of those that were skipped only where the run
        diverged, which makes it NaN.
      gap: percent, infinite where a loss is not finite; None without the reference.
      gap_spread: None for a single seed, and where a gap is not finite.
    """

    train_loss: float
    gap: float | None
    gap_spread: float | None
    tokens_per_s: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """The rows of the table, and whether the comparison can be believed.

    Attributes:
      average: last steps, whose mean is the training loss.
      valid: the control is plainly worse than every other policy; None where the
        reference or the control did not train.
      verdict: the same as a sentence.
    """

    policies: tuple[Row, ...]
    baselines: tuple[BaselineRow, ...]
    average: int
    valid: bool | None
    verdict: str


def summarize(
    trials: Sequence[Trial], baselines: Sequence[Baseline], *, average: int
) -> Report:
    """Returns the report of a comparison.

    Args:
      trials: of policies, the reference and the control among them, all on the same
        seeds.
      baselines: of n-gram models on those seeds.
      average: last steps, whose mean is the training loss.
    """
    rows = tuple(_row(group, trials, average) for group in by_name(trials))
    valid, verdict = judge(rows)
    return Report(
        policies=rows,
        baselines=tuple(BaselineRow(**heldout(g)) for g in by_name(baselines)),
        average=min(average, len(trials[0].losses)),
        valid=valid,
        verdict=verdict,
    )


class HasGap(Protocol):
    """What decides whether a comparison can be believed."""

    @property
    def name(self) -> str:
        """Of the policy."""
        ...

    @property
    def gap(self) -> float | None:
        """In percent, infinite where it diverged."""
        ...

    @property
    def gap_spread(self) -> float | None:
        """Of the seeds."""
        ...


def judge(rows: Sequence[HasGap]) -> tuple[bool | None, str]:
    """Returns whether the control is plainly worse than the rest, and a sentence.

    gap of the control > max(PLAINLY * m, m + s)

    with m the largest other gap, at least 0, and s the largest spread of any gap: a run
    in which quantization silently did nothing fails.
    """
    gaps = {row.name: row.gap for row in rows if row.gap is not None}
    if not gaps.keys() >= {REFERENCE, CONTROL}:
        return None, (
            f"Not compared: {REFERENCE} and the control ({CONTROL}) did not both train."
        )
    # The gap of BF16 to itself is 0, or infinite where BF16 itself diverged.
    largest = max(gap for name, gap in gaps.items() if name != CONTROL)
    spread = max(row.gap_spread or 0.0 for row in rows)
    bound = max(PLAINLY * largest, largest + spread)
    valid = gaps[CONTROL] > bound
    outcome = (
        f"The gap of the control ({CONTROL}) is {percent(gaps[CONTROL])}, the largest "
        f"other {percent(largest)}"
    )
    if valid:
        return True, f"{outcome}: quantization takes effect, and 2 bits lose plainly."
    return False, (
        f"DO NOT TRUST THIS COMPARISON. {outcome}, but the control's must exceed "
        f"{percent(bound)}. Either the run is too short to tell policies apart, or "
        "quantization had no effect."
    )


def by_name(trials: Sequence[T]) -> list[list[T]]:
    """Returns the trials of each name, in the order they come."""
    groups = defaultdict(list)
    for trial in trials:
        groups[trial.name].append(trial)
    return list(groups.values())


def heldout(group: Sequence[Baseline]) -> dict[str, Any]:
    """Returns the fields of a row that every kind of model has."""
    loss, spread = mean_and_spread([trial.heldout_loss for trial in group])
    return {
        "name": group[0].name,
        "heldout_loss": loss,
        "heldout_spread": spread,
        "bits_per_byte": statistics.fmean(trial.bits_per_byte for trial in group),
    }


def _row(group: Sequence[Trial], trials: Sequence[Trial], average: int) -> Row:
    reference = {t.seed: t.heldout_loss for t in trials if t.name == REFERENCE}
    gap = spread = None
    if reference:
        gaps = [percent_over(t.heldout_loss, reference[t.seed]) for t in group]
        gap, spread = mean_and_spread(
            [g if math.isfinite(g) else math.inf for g in gaps]
        )
    speeds = [t.tokens_per_s for t in group if t.tokens_per_s is not None]
    return Row(
        **heldout(group),
        train_loss=statistics.fmean(_train_loss(t, average) for t in group),
        gap=gap,
        gap_spread=spread,
        tokens_per_s=statistics.fmean(speeds) if speeds else None,
    )


def _train_loss(trial: Trial, average: int) -> float:
    """Returns the mean of the last steps, without skipped ones unless it diverged."""
    last = np.array(trial.losses[-average:])
    known = last[np.isfinite(last)]
    diverged = not math.isfinite(trial.heldout_loss) or not known.size
    return float(np.mean(last if diverged else known))


def mean_and_spread(values: Sequence[float]) -> tuple[float, float | None]:
    """Returns the mean and the sample standard deviation, None where undefined."""
    defined = len(values) > 1 and all(map(math.isfinite, values))
    return statistics.fmean(values), statistics.stdev(values) if defined else None
