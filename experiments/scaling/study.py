"""Which runs there are, and what is shown of them."""

from collections.abc import Mapping
from pathlib import Path

from experiments.many_runs import budget, show
from experiments.many_runs.command import Study
from experiments.many_runs.found import Found
from experiments.many_runs.run import Run, tiny
from experiments.many_runs.tuning import tuned, tuning
from experiments.scaling import report

SEEDS = {"dense_3m": 3, "dense_4m": 6, "dense_9m": 3, "dense_18m": 1, "dense_35m": 1}
POLICIES = ("bf16", "e2m1_ref", "ufp4")
_TUNED = ("dense_3m", "dense_4m", "dense_9m")  # larger ones take the last one's rate


def of_model(found: Found, model: str, assumed: float | None = None) -> list[Run]:
    """Returns the runs of a model, none before its rate is known."""
    of = model if model in _TUNED else _TUNED[-1]
    base = tuned(found, of, assumed=assumed)
    return Run.whole(model, base.lr).seeded(POLICIES, SEEDS[model]) if base else []


def queue(found: Found, assumed: float | None = None) -> list[Run]:
    """Returns the runs, the smallest models first, each with its rates before."""
    return [
        run
        for model in SEEDS
        for run in (
            *(tuning(found, model) if model in _TUNED else ()),
            *of_model(found, model, assumed),
        )
    ]


def parts(found: Found, folder: Path) -> Mapping[str, str]:
    """Returns the tables of the README, and draws its figure."""
    by_model = {m: found.rows_of(of_model(found, m)) for m in SEEDS}
    rows = [row for group in by_model.values() for row in group]
    if rows:
        report.draw(rows, folder / "scaling.png")
    return {
        "rates": show.of_rates(found, _TUNED),
        "budget": show.of_budget(queue(found, budget.RATE), found),
        "sizes": report.sizes(by_model),
        "laws": report.laws(rows),
        "trend": report.trend(rows),
    }


STUDY = Study(
    folder=Path(__file__).parent,
    queue=queue,
    tiny=tiny("bf16", "e2m1_ref"),
    parts=parts,
)
