"""Which runs there are, and what is shown of them."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path

from experiments.many_runs import budget, show
from experiments.many_runs.command import Study
from experiments.many_runs.found import Found
from experiments.many_runs.run import Run, tiny
from experiments.many_runs.tuning import tuned, tuning
from experiments.scaling import report

# Twenty tokens and more for each parameter.
TOKENS = {
    "dense_2m": 40_000_000,
    "dense_4m": 97_000_000,
    "dense_9m": 180_000_000,
    "dense_18m": 370_000_000,
    "dense_35m": 650_000_000,
}
SEEDS = {"dense_2m": 3, "dense_4m": 3, "dense_9m": 3, "dense_18m": 1, "dense_35m": 1}
POLICIES = ("bf16", "e2m1_ref", "ufp4")
_TUNED = ("dense_2m", "dense_4m", "dense_9m")  # larger ones take the last one's rate


def of_model(found: Found, model: str, assumed: float | None = None) -> list[Run]:
    """Returns the runs of a model, none before its rate is known."""
    of = model if model in _TUNED else _TUNED[-1]
    rate = tuned(found, of, TOKENS[of], assumed=assumed)
    if rate is None:
        return []
    base = Run(policy="bf16", model=model, tokens=TOKENS[model], lr=rate)
    return [
        dataclasses.replace(base, policy=policy, seed=seed, noise=seed)
        for policy in POLICIES
        for seed in range(SEEDS[model])
    ]


def queue(found: Found, assumed: float | None = None) -> list[Run]:
    """Returns the runs, the smallest models first, each with its rates before."""
    return [
        run
        for model, tokens in TOKENS.items()
        for run in (
            *(tuning(found, model, tokens) if model in _TUNED else ()),
            *of_model(found, model, assumed),
        )
    ]


def parts(found: Found, folder: Path) -> Mapping[str, str]:
    """Returns the tables of the README, and draws its figure."""
    by_model = {m: found.rows_of(of_model(found, m)) for m in TOKENS}
    rows = [row for group in by_model.values() for row in group]
    if rows:
        report.draw(rows, folder / "scaling.png")
    return {
        "rates": show.of_rates(found, {model: TOKENS[model] for model in _TUNED}),
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
