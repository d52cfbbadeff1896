"""How far runs have come, and where every policy stands at that moment."""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence

from experiments.presets import REFERENCE
from experiments.report import tables
from experiments.report.runs import ALL, Group, Trial
from experiments.report.summary import judge, mean_and_spread

HEADER = (
    *("", "seeds done", "tokens seen", "train loss", "held-out loss", "bits/byte"),
    *("gap to BF16", "spikes", "skipped", "tokens/s"),
)
CAPTION = (
    "Losses in nats/token, the training loss averaged over about a fiftieth of the "
    "run (20 steps or more), the held-out loss from the newest evaluation. The gap is "
    "that of the held-out loss (of the training loss, marked *, while there is none) "
    "in percent of BF16's of the same seed at the same step: positive is worse than "
    "BF16. Means over seeds, +- the sample standard deviation; policies may have come "
    "differently far."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Standing:
    """Where one policy stands: means over seeds, and sample standard deviations.

    Attributes:
      finished: of so many seeds.
      diverged: of so many; their gap is infinite.
      tokens: of the seed that has come furthest.
      gap: percent; None without a BF16 run of the same seed.
      by_train: the gap is that of the training loss.
      domains: held-out gap of each, where there are several.
    """

    name: str
    seeds: int
    finished: int
    diverged: int
    tokens: int
    train_loss: float | None
    heldout_loss: float | None
    heldout_spread: float | None
    bits_per_byte: float | None
    gap: float | None
    gap_spread: float | None
    by_train: bool
    domains: dict[str, tuple[float | None, float | None]]
    spikes: int
    skipped: int
    tokens_per_s: float | None

    @property
    def cells(self) -> tuple[str, ...]:
        """The text of the columns of `HEADER`."""
        done = f"{self.finished}/{self.seeds}"
        if self.diverged:
            done += f" ({self.diverged} diverged)"
        spread = None if self.name == REFERENCE else self.gap_spread
        gap = tables.gap(self.gap, spread)
        return (
            self.name,
            done,
            f"{self.tokens:,}",
            tables.number(self.train_loss),
            tables.number(self.heldout_loss, self.heldout_spread),
            tables.number(self.bits_per_byte),
            f"{gap} *" if gap and self.by_train else gap,
            f"{self.spikes}",
            f"{self.skipped}",
            tables.speed(self.tokens_per_s),
        )


def standings(group: Group) -> list[Standing]:
    """Returns where every policy of a group stands, the first one trained first."""
    return [_standing(name, found, group) for name, found in group.policies.items()]


def verdict(group: Group, rows: Sequence[Standing]) -> str:
    """Returns whether the comparison can be believed, or what is missing for that."""
    if missing := sorted(group.missing):
        names = ", ".join(f"{policy}-{seed}" for policy, seed in missing)
        return f"Not finished: {names}."
    return judge(rows)[1]


def _standing(name: str, trials: Sequence[Trial], group: Group) -> Standing:
    heldout, heldout_spread = _newest([t.heldout.get(ALL, {}) for t in trials])
    diverged = sum(t.stopped_by is not None for t in trials)
    gaps = [group.heldout_gap(t) for t in trials]
    by_train = not any(gaps)
    gap, gap_spread = _newest(
        [_known(t, group.train_gap(t)) for t in trials] if by_train else gaps
    )
    if diverged and gap is not None:
        gap, gap_spread = float("inf"), None
    domains = {
        domain: _newest([group.heldout_gap(t, domain) for t in trials])
        for domain in group.domains
        if domain != ALL
    }
    speeds = [statistics.harmonic_mean(t.speeds) for t in trials if t.speeds]
    return Standing(
        name=name,
        seeds=len(trials),
        finished=sum(t.finished for t in trials),
        diverged=diverged,
        tokens=max(t.step * t.tokens_per_step for t in trials),
        train_loss=_newest([_known(t, t.smoothed) for t in trials])[0],
        heldout_loss=heldout,
        heldout_spread=heldout_spread,
        bits_per_byte=_newest([t.bits_per_byte for t in trials])[0],
        gap=gap,
        gap_spread=gap_spread,
        by_train=by_train,
        domains=domains,
        spikes=sum(t.spikes for t in trials),
        skipped=sum(t.skipped for t in trials),
        tokens_per_s=statistics.fmean(speeds) if speeds else None,
    )


def _known(trial: Trial, values: Mapping[int, float]) -> Mapping[int, float]:
    """Returns the values of steps that were not skipped; all if the run diverged."""
    known = {step: value for step, value in values.items() if math.isfinite(value)}
    return values if trial.stopped_by is not None or not known else known


def _newest(found) -> tuple[float | None, float | None]:
    """Returns mean and spread over seeds of the value at the newest step of each."""
    values = [values[max(values)] for values in found if values]
    return mean_and_spread(values) if values else (None, None)
