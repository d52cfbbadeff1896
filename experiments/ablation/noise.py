"""What makes runs of one recipe differ: one source of randomness at a time.

A first comparison found `ufp4` to spread over streams of random bits and over signs far
more than `e2m1_ref`. Here everything but one source stays as it is.
"""

import dataclasses
import math
from collections.abc import Sequence

from scipy import stats

from experiments.ablation.onset import onset
from experiments.folder import Row
from experiments.many_runs.found import Found, loss
from experiments.many_runs.run import Run
from experiments.many_runs.show import NOT_RUN
from experiments.presets import REFERENCE
from experiments.report import tables
from experiments.report.summary import mean_and_spread

SMALL = "dense_2m"

_FP4 = ("e2m1_ref", "ufp4")
_WHOLE = (REFERENCE, *_FP4)
_STREAMS = range(6)  # of random bits
_SIGNS = ("ufp4_signs_3", "ufp4_signs_6", "ufp4_signs_per_step")
_SITES = ("ufp4_sr_dgrad", "ufp4_sr_wgrad")


def runs(small: Run, larger: Run) -> list[Run]:
    """Returns the runs of all sources.

    Args:
      small: BF16 at the tuned rate.
      larger: likewise, of a model of which there are fewer runs.
    """
    of = dataclasses.replace
    slower = slowed(small)
    seeds = [run for base in (slower, small, larger) for run in base.seeded(_WHOLE, 3)]
    streams = [
        of(base, policy=policy, noise=noise)
        for base, policies, noises in (
            (slower, (*_FP4, *_SITES), _STREAMS),
            (small, _FP4, _STREAMS),
            (larger, _FP4, _STREAMS[:3]),
        )
        for policy in policies
        for noise in noises
    ]
    signs = [
        of(slower, policy=policy, noise=noise) for policy in _SIGNS for noise in (0, 1)
    ]
    nowhere = of(slower, policy="ufp4_no_sr")
    return list(dict.fromkeys([*seeds, *streams, *signs, nowhere]))


def slowed(base: Run) -> Run:
    """Returns a run at half of the rate."""
    return dataclasses.replace(base, lr=base.lr / 2)


def table(found: Found, runs: Sequence[Run]) -> str:
    """Returns for each policy, model, rate and what varies the spread of the loss.

    With its interval of 95%, of chi squared, as if losses were normal, and the first
    and the last onset.
    """
    groups: dict[tuple[str, str, float, str], list[Row]] = {}
    for row in found.rows_of(runs):
        kind = row["model"], row["policy"], row["lr"]
        if row["seed"] == 0:
            groups.setdefault((*kind, "random bits"), []).append(row)
        if row["seed"] == row["noise"]:
            groups.setdefault((*kind, "all seeds"), []).append(row)
    lines = []
    for (model, policy, lr, varied), rows in groups.items():
        if len(rows) == 1 and varied == "all seeds":
            continue  # as the other line has it
        mean, deviation = mean_and_spread([loss(row) for row in rows])
        names = (f"`{policy}`", f"`{model}`", f"{lr:g}", varied)
        spread = _spread(deviation, len(rows))
        onsets = list(map(onset, rows))
        cells = (str(len(rows)), tables.number(mean), *spread, _range(onsets))
        lines.append((*names, *cells))
    header = ("policy", "model", "lr", "what differs", "runs", "mean", "deviation")
    header += ("95% of it", "onset, step")
    return tables.markdown(header, lines) if lines else NOT_RUN


def _range(onsets: Sequence[float | None]) -> str:
    """Returns the first and the last onset, and whether there are runs without."""
    known = [step for step in onsets if step is not None]
    ends = dict.fromkeys(f"{end(known):.0f}" for end in (min, max) if known)
    never = "never" if None in onsets else ""
    return " or ".join(filter(None, (" to ".join(ends), never)))


def _spread(deviation: float | None, count: int) -> tuple[str, str]:
    """Returns a standard deviation of so many runs, and its interval."""
    if deviation is None:
        return "", ""
    ends = (
        deviation * math.sqrt((count - 1) / stats.chi2.ppf(part, count - 1))
        for part in (0.975, 0.025)
    )
    return f"{deviation:.4f}", " to ".join(f"{end:.4f}" for end in ends)
