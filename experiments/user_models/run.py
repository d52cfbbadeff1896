"""Trains models their authors wrote, by both ways of injecting every recipe.

    python -m experiments.user_models.run

Prints the table of the README, then writes one JSON object a line to results.jsonl
beside this file.
"""

import argparse
import itertools
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments import record
from experiments.side_by_side import side_by_side
from experiments.user_models import train_linen, train_nnx
from fp4jax import recipes
from fp4jax.train import JsonLines

LIBRARIES = {"nnx": train_nnx, "linen": train_linen}
RECIPES = {
    make.__name__: make()
    for make in (
        recipes.e2m1_ref,
        recipes.ufp4,
        recipes.nvfp4,
        recipes.mxfp4,
        recipes.mxfp4_tseng,
        recipes.mxfp8,
        recipes.ue5m3,
        recipes.ti2d,
        recipes.four_over_six,
        recipes.quartet2,
        recipes.int2,
    )
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the study; the exit status is 1 if a run is not as it must be."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.user_models.run",
        description=(__doc__ or "").partition("\n")[0],
    )
    parser.add_argument("--steps", type=int, default=20, help="of every run")
    parser.add_argument("--jobs", type=int, default=2, help="models trained at a time")
    out = str(Path(__file__).parent / "results.jsonl")
    parser.add_argument("--out", default=out, help="file for the results")
    arguments = parser.parse_args(argv)
    if arguments.jobs < 1:
        parser.error(f"--jobs must be positive, got {arguments.jobs}")
    if arguments.steps < 2:
        parser.error(
            "--steps must be at least 2, for the first loss shows no update, got "
            f"{arguments.steps}"
        )
    names = (None, *RECIPES)
    tasks = itertools.product(LIBRARIES, train_nnx.MODELS, names, [arguments.steps])
    try:
        rows = judged(list(side_by_side(train, tasks, jobs=arguments.jobs)))
    except ChildProcessError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(table(rows))
    write(Path(arguments.out), [{"steps": arguments.steps, **record.setting()}, *rows])
    return 0 if all(is_good(row) for row in rows) else 1


def write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Writes a new file of JSON lines, with null for losses that are not finite."""
    path.unlink(missing_ok=True)
    with JsonLines(path) as log:
        for row in rows:
            log.write(row)


def train(library: str, model: str, recipe: str | None, steps: int) -> dict[str, Any]:
    """Returns what became of a model under a recipe, by each way of injecting it."""
    module = LIBRARIES[library]
    row = {"library": library, "model": model, "recipe": recipe}
    if recipe is None:
        return row | {"losses": module.losses(model, None, "none", steps=steps)}
    found = {
        injection: module.losses(model, RECIPES[recipe], injection, steps=steps)
        for injection in module.INJECTIONS[1:]
    }
    losses, *others = found.values()
    equal = all(other == losses for other in others)
    return row | {"injections": list(found), "equal": equal, "losses": losses}


def judged(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Adds whether losses are finite and other than those of the unquantized model."""
    plain = {
        (row["library"], row["model"]): row["losses"]
        for row in rows
        if row["recipe"] is None
    }
    return [
        row
        | {
            "finite": all(map(math.isfinite, row["losses"])),
            "differs": row["recipe"] is not None
            and differs(row["losses"], plain[row["library"], row["model"]]),
        }
        for row in rows
    ]


def differs(losses: Sequence[float], plain: Sequence[float]) -> bool:
    """Returns whether no loss is that of the unquantized model.

    But for the first: it shows the forward pass alone, which some recipes leave as is.
    """
    return all(a != b for a, b in zip(losses[1:], plain[1:], strict=True))


def is_good(row: dict[str, Any]) -> bool:
    """Returns whether a run is finite, quantized, and equal however it is injected."""
    if row["recipe"] is None:
        return row["finite"]
    return row["finite"] and row["equal"] and row["differs"]


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Returns the mean loss of the last quarter of the steps, by recipe and model."""
    columns = list(dict.fromkeys((row["model"], row["library"]) for row in rows))
    cells = {}
    for row in rows:
        last = row["losses"][-max(1, len(row["losses"]) // 4) :]
        key = row["recipe"] or "unquantized", (row["model"], row["library"])
        cells[key] = f"{math.fsum(last) / len(last):.4f}" + " (!)" * (not is_good(row))
    lines = [
        ["", *(f"{model}, {library}" for model, library in columns)],
        ["---", *["---:"] * len(columns)],
        *(
            [recipe, *(cells[recipe, column] for column in columns)]
            for recipe in dict.fromkeys(recipe for recipe, _ in cells)
        ),
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
