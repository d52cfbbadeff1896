"""Which runs there are, and what is shown of them."""

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path

from experiments.ablation import noise
from experiments.many_runs import budget, show
from experiments.many_runs.command import Study
from experiments.many_runs.found import Found
from experiments.many_runs.run import Run, tiny
from experiments.many_runs.tuning import tuned, tuning
from experiments.many_runs.variants import TI2D, UE5M3

MODEL, SEEDS = "dense_2m", 3

# By the recipe that they are parts of, which comes first.
SECTIONS: Mapping[str, tuple[str, ...]] = {
    "ufp4": (
        "ufp4",
        "ufp4_no_rht",
        "ufp4_rht_wgrad",
        "ufp4_rht_dgrad_wgrad",
        "ufp4_rht_fprop_wgrad",
        "ufp4_no_sr",
        "e2m1_ref",
        "e2m1_rht",
        "e2m1_to_2_rht",
    ),
    "ue5m3": ("ue5m3_plain", *(name for name in UE5M3 if name != "ue5m3_plain")),
    "ti2d": ("ti2d", *TI2D),
}


def base(found: Found, assumed: float | None = None) -> Run | None:
    """Returns the BF16 run at half of the tuned rate, or None before it is tuned.

    At the tuned rate this model is close to where training fails, and random bits alone
    make losses differ by as much as recipes do.
    """
    rate = tuned(found, MODEL, assumed=assumed)
    return None if rate is None else Run.whole(MODEL, rate / 2)


def seeded(base: Run, policies: Iterable[str]) -> list[Run]:
    """Returns every policy with every seed."""
    return [
        dataclasses.replace(base, policy=policy, seed=seed, noise=seed)
        for policy in policies
        for seed in range(SEEDS)
    ]


def queue(found: Found, assumed: float | None = None) -> list[Run]:
    """Returns the runs: of the parts of each recipe, then of the noise."""
    runs = tuning(found, MODEL)
    if (first := base(found, assumed)) is None:
        return runs
    policies = (policy for section in SECTIONS.values() for policy in section)
    runs += [*seeded(first, ("bf16", *policies)), *noise.runs(first)]
    return list(dict.fromkeys(runs))


def parts(found: Found, folder: Path) -> Mapping[str, str]:
    """Returns the tables of the README."""
    del folder
    shown = {"budget": show.of_budget(queue(found, budget.RATE), found)}
    first = base(found)
    for name, section in SECTIONS.items():
        runs = [] if first is None else seeded(first, ("bf16", *section))
        shown[name] = show.of_gaps(found.rows_of(runs), base=section[0])
    runs = [] if first is None else noise.runs(first)
    return shown | {"noise": noise.table(found, runs)}


STUDY = Study(
    folder=Path(__file__).parent,
    queue=queue,
    tiny=tiny("bf16", "ufp4_rht_wgrad"),
    parts=parts,
)
