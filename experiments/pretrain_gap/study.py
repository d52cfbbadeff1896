"""Which runs there are, and what is shown of them."""

import itertools
from collections.abc import Mapping
from pathlib import Path

from experiments.folder import Row
from experiments.many_runs import budget, figure, show
from experiments.many_runs.command import Study
from experiments.many_runs.found import Found
from experiments.many_runs.gaps import gaps
from experiments.many_runs.run import Run, tiny
from experiments.many_runs.tuning import tuned, tuning
from experiments.presets import REFERENCE
from experiments.pretrain_gap import dots
from experiments.report import tables
from experiments.report.summary import mean_and_spread

MODELS = ("dense_9m", "moe_11m")
SEEDED = ("bf16", "e2m1_ref", "ufp4")
OTHERS = ("ufp4_e4m3", "nvfp4", "ue5m3", "ti2d", "mxfp4", "quartet2")
_NAMES = {"ufp4_e4m3": "`ufp4(Scale(E4M3))`"}  # of what is no preset


def main_runs(found: Found, model: str, assumed: float | None = None) -> list[Run]:
    """Returns the runs of a model at its tuned rate, none before it is tuned."""
    base = tuned(found, model, assumed=assumed)
    return base.seeded(SEEDED, 3) + base.seeded(OTHERS, 1) if base else []


def queue(found: Found, assumed: float | None = None) -> list[Run]:
    """Returns the runs: rates first, then three seeds, then the other policies.

    The rates of the mixture are tried after those of the dense model are known.
    """
    runs: list[Run] = []
    for model in MODELS:
        of_model = main_runs(found, model, assumed)
        runs += [*tuning(found, model), *of_model]
        if not of_model:
            break
    return runs


def parts(found: Found, folder: Path) -> Mapping[str, str]:
    """Returns the tables of the README, and draws its figures."""
    shown = {
        "rates": show.of_rates(found, MODELS),
        "budget": show.of_budget(queue(found, budget.RATE), found),
    }
    by_model = _by_model(found)
    for model in MODELS:
        rows = by_model.get(model, [])
        shown[model] = show.of_gaps(rows, base="e2m1_ref")
        shown[f"{model} by domain"] = show.of_domains(rows)
        if rows:
            path = folder / f"{model}.png"
            figure.draw(rows, path, policies=(*SEEDED, *OTHERS))
    dots.draw(by_model, folder / "gaps.png")
    return shown


def front(found: Found) -> Mapping[str, str]:
    """Returns the losses and gaps of all models in one table."""
    columns = {
        model: {each.policy: each for each in gaps(rows)}
        for model, rows in _by_model(found).items()
    }
    lines = []
    for policy in (*SEEDED, *OTHERS):
        cells = [_NAMES.get(policy, f"`{policy}`")]
        for each in (column.get(policy) for column in columns.values()):
            losses, of_it = ((), ()) if each is None else (each.losses, each.gaps)
            cells.append(tables.number(*mean_and_spread(losses)) if losses else "")
            cells.append("" if policy == REFERENCE else show.gap(of_it))
        lines.append(cells)
    models = ((f"`{model}`, held-out loss", "gap to BF16") for model in columns)
    header = ("policy", *itertools.chain.from_iterable(models))
    return {"gaps": tables.markdown(header, lines)}


def _by_model(found: Found) -> dict[str, list[Row]]:
    """Returns the rows at the tuned rate of each model that has some."""
    by_model = {model: found.rows_of(main_runs(found, model)) for model in MODELS}
    return {model: rows for model, rows in by_model.items() if rows}


STUDY = Study(
    folder=Path(__file__).parent,
    queue=queue,
    tiny=tiny("bf16", "ufp4"),
    parts=parts,
    front=front,
)
