"""Which runs there are, and what is shown of them."""

import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path

from experiments.ablation import grids, noise, onset
from experiments.folder import Row
from experiments.many_runs import budget, show
from experiments.many_runs.command import Study
from experiments.many_runs.found import Found
from experiments.many_runs.run import Run, tiny
from experiments.many_runs.tuning import tuned, tuning
from experiments.many_runs.variants import TI2D, UE5M3

MODEL, SEEDS = "dense_4m", 3
MORE_SEEDS = 6  # of what three seeds do not tell apart

# By the recipe that they are parts of, which comes first.
SECTIONS: Mapping[str, tuple[str, ...]] = {
    "ufp4": (
        "ufp4",
        "ufp4_no_rht",
        "ufp4_rht_wgrad",
        "ufp4_rht_dgrad_wgrad",
        "ufp4_rht_fprop_wgrad",
        "ufp4_no_sr",
        "e2m1_no_rht",
        "e2m1_ref",
        "e2m1_rht",
        "e2m1_to_2_rht",
    ),
    "ue5m3": tuple(UE5M3),
    "ti2d": ("ti2d", *TI2D),
}
_CLOSE = ("bf16", "ufp4", "ufp4_no_rht", "ufp4_rht_wgrad", "ufp4_no_sr", "e2m1_ref")


def queue(found: Found, assumed: float | None = None) -> list[Run]:
    """Returns the runs: of the parts of each recipe, of the noise, of more seeds."""
    policies = ("bf16", *(name for section in SECTIONS.values() for name in section))
    runs = tuning(found, MODEL)
    if first := tuned(found, MODEL, assumed=assumed):
        runs += first.seeded(policies, SEEDS)
        runs += tuning(found, noise.SMALL)
        if small := tuned(found, noise.SMALL, assumed=assumed):
            runs += noise.runs(small, first)
        runs += first.seeded(_CLOSE, MORE_SEEDS)
    return list(dict.fromkeys(runs))


def parts(found: Found, folder: Path) -> Mapping[str, str]:
    """Returns the tables of the README, and draws its figures."""
    shown = {"budget": show.of_budget(queue(found, budget.RATE), found)}
    first, small = tuned(found, MODEL), tuned(found, noise.SMALL)

    def rows_of(policies: Iterable[str]) -> list[Row]:
        runs = first.seeded(("bf16", *policies), MORE_SEEDS) if first else []
        return found.rows_of(runs)

    for name, section in SECTIONS.items():
        shown[name] = show.of_gaps(rows_of(section), base=section[0])
    rotated = rows_of(itertools.chain(*grids.SCOPES.values()))
    shown["grids"] = grids.table(rotated)
    grids.draw(rotated, folder / "grids.png")
    if small is None:
        return shown | {"noise": show.NOT_RUN}
    slow = noise.slowed(small)
    alike = {"tokens": slow.tokens, "rows": slow.rows, "lr": slow.lr}
    onset.draw(found.find(model=slow.model, **alike), folder / "onset.png")
    return shown | {"noise": noise.table(found, noise.runs(small, first or small))}


STUDY = Study(
    folder=Path(__file__).parent,
    queue=queue,
    tiny=tiny("bf16", "ufp4_rht_wgrad"),
    parts=parts,
)
