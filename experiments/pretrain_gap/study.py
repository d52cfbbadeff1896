"""Which runs there are."""

import dataclasses
import itertools
from collections.abc import Mapping
from pathlib import Path

from experiments.many_runs.command import Study
from experiments.many_runs.run import Run
from experiments.study import Results

RATES = (1e-3, 2e-3, 4e-3, 8e-3)
# Twenty tokens and more for each parameter.
TOKENS = {"dense_9m": 180_000_000, "moe_12m": 250_000_000}
SEEDED = ("bf16", "e2m1_ref", "ufp4")
OTHERS = ("ufp4_e4m3", "nvfp4", "ue5m3", "ti2d", "mxfp4", "quartet2")
_TUNED = 0.25  # of the tokens, that a rate is tried for


def tuning(model: str) -> list[Run]:
    """Returns BF16 at every learning rate, for a part of the tokens."""
    tokens = int(_TUNED * TOKENS[model])
    base = Run(policy="bf16", model=model, tokens=tokens, lr=RATES[0])
    return [dataclasses.replace(base, lr=rate) for rate in RATES]


def tuned(results: Results, model: str) -> float | None:
    """Returns the rate of the least held-out loss, or None while some are missing."""
    found = [results.find(**run.piece) for run in tuning(model)]
    if not all(found):
        return None
    best = min(found, key=lambda rows: rows[0]["heldout"]["bf16"]["all"]["loss"])
    return best[0]["lr"]


def queue(results: Results) -> list[Run]:
    """Returns the runs: rates first, then three seeds, then the other policies."""
    runs: list[Run] = []
    for model, tokens in TOKENS.items():
        runs += tuning(model)
        if (rate := tuned(results, model)) is None:
            continue
        base = Run(policy="bf16", model=model, tokens=tokens, lr=rate)
        seeds = itertools.product(SEEDED, range(3))
        kinds = [*seeds, *((policy, 0) for policy in OTHERS)]
        runs += [
            dataclasses.replace(base, policy=policy, seed=seed, noise=seed)
            for policy, seed in kinds
        ]
    return runs


def tiny() -> list[Run]:
    """Returns one run of each of two policies."""
    base = Run(policy="bf16", model="tiny", tokens=1, lr=4e-3, rows=2, length=64)
    base = dataclasses.replace(base, at_once=2)
    return [dataclasses.replace(base, policy=policy) for policy in ("bf16", "ufp4")]


def parts(results: Results, folder: Path) -> Mapping[str, str]:
    """Returns the tables of the README."""
    del results, folder
    return {}


STUDY = Study(folder=Path(__file__).parent, queue=queue, tiny=tiny, parts=parts)
