"""Which runs there are, and what is shown of them."""

import dataclasses
import itertools
from collections.abc import Mapping
from pathlib import Path

from experiments.many_runs import budget, figure, show
from experiments.many_runs.command import Study
from experiments.many_runs.found import Found
from experiments.many_runs.run import Run, tiny
from experiments.many_runs.tuning import tuned, tuning

# Twenty tokens and more for each parameter.
TOKENS = {"dense_9m": 180_000_000, "moe_11m": 220_000_000}
SEEDED = ("bf16", "e2m1_ref", "ufp4")
OTHERS = ("ufp4_e4m3", "nvfp4", "ue5m3", "ti2d", "mxfp4", "quartet2")


def main_runs(found: Found, model: str, assumed: float | None = None) -> list[Run]:
    """Returns the runs of a model at its tuned rate, none before it is tuned."""
    tokens = TOKENS[model]
    if (rate := tuned(found, model, tokens, assumed=assumed)) is None:
        return []
    base = Run(policy="bf16", model=model, tokens=tokens, lr=rate)
    seeds = itertools.product(SEEDED, range(3))
    return [
        dataclasses.replace(base, policy=policy, seed=seed, noise=seed)
        for policy, seed in (*seeds, *((policy, 0) for policy in OTHERS))
    ]


def queue(found: Found, assumed: float | None = None) -> list[Run]:
    """Returns the runs: rates first, then three seeds, then the other policies.

    The rates of the mixture are tried after those of the dense model are known.
    """
    runs: list[Run] = []
    for model, tokens in TOKENS.items():
        of_model = main_runs(found, model, assumed)
        runs += [*tuning(found, model, tokens), *of_model]
        if not of_model:
            break
    return runs


def parts(found: Found, folder: Path) -> Mapping[str, str]:
    """Returns the tables of the README, and draws its figure."""
    shown = {
        "rates": show.of_rates(found, TOKENS),
        "budget": show.of_budget(queue(found, budget.RATE), found),
    }
    for model in TOKENS:
        rows = found.rows_of(main_runs(found, model))
        shown[model] = show.of_gaps(rows, base="e2m1_ref")
        shown[f"{model} by domain"] = show.of_domains(rows)
        if rows:
            path = folder / f"{model}.png"
            figure.draw(rows, path, policies=(*SEEDED, *OTHERS))
    return shown


STUDY = Study(
    folder=Path(__file__).parent,
    queue=queue,
    tiny=tiny("bf16", "ufp4"),
    parts=parts,
)
