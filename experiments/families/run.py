"""Trains the smallest model of every family under every policy.

    python -m experiments.families.run

Writes the losses of every model to a file below `results`, one JSON object a line, and
prints the table of the README.
"""

import argparse
import itertools
import math
import operator
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from flax import nnx

from experiments import presets, record
from experiments.presets import REFERENCE
from experiments.side_by_side import side_by_side
from experiments.trial import batches_of
from fp4jax import data, models, policies, train
from fp4jax.train import JsonLines

MODELS = ("tiny", "olmo_tiny", "nemotron_h_tiny", "qwen3_tiny", "moe_tiny")
DATA = ("data.batch_size=8", "data.sequence_length=128")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the study; the exit status is 1 if a run is not as it must be."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.families.run",
        description=(__doc__ or "").partition("\n")[0],
    )
    parser.add_argument("--steps", type=int, default=30, help="of every run")
    parser.add_argument("--jobs", type=int, default=2, help="models trained at a time")
    parser.add_argument(
        "--models", nargs="+", choices=MODELS, default=MODELS, help="which to train"
    )
    out = str(Path(__file__).parent / "results")
    parser.add_argument("--out", default=out, help="folder for the results")
    arguments = parser.parse_args(argv)
    if arguments.jobs < 1:
        parser.error(f"--jobs must be positive, got {arguments.jobs}")
    if arguments.steps < 10:
        parser.error(f"--steps must be at least 10, got {arguments.steps}")
    setting = {"steps": arguments.steps, "data": DATA, **record.setting()}
    folder = Path(arguments.out)
    folder.mkdir(parents=True, exist_ok=True)
    tasks = itertools.product(arguments.models, policies.PRESETS, [arguments.steps])
    rows, runs = [], side_by_side(trained, tasks, jobs=arguments.jobs)
    try:
        for model in arguments.models:
            found = judged(list(itertools.islice(runs, len(policies.PRESETS))))
            write(folder / f"{model}.jsonl", [setting, *found])
            rows += found
    except ChildProcessError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(table(rows))
    return 0 if all(is_good(row) for row in rows) else 1


def write(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Writes a new file of JSON lines."""
    path.unlink(missing_ok=True)
    with JsonLines(path) as log:
        for row in rows:
            log.write(row)


def trained(model: str, policy: str, steps: int) -> dict[str, Any]:
    """Returns the losses of some steps of training, all policies on equal batches."""
    config = presets.resolve(
        model, policy_names=[policy], steps=steps, alone=True, assignments=DATA
    )
    schedule = presets.schedule(config, policy)
    optimizer = train.make_optimizer(config.optim, steps=steps)
    graph, state = train.make_state(
        models.Transformer(config.model, schedule, rngs=nnx.Rngs(0)),
        optimizer.transform,
    )
    step, losses = train.make_train_step(graph, optimizer), []
    batches = batches_of(data.load_corpus(config.data), config, seed=0)
    for batch in itertools.islice(batches, steps):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return {"model": model, "policy": policy, "losses": losses}


def judged(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Adds whether the losses of a model fall, and all differ from those of BF16.

    But for the first: it shows the forward pass alone, which some policies leave as is.
    """
    plain = next(row["losses"] for row in rows if row["policy"] == REFERENCE)
    differ = lambda losses: all(map(operator.ne, losses[1:], plain[1:]))
    return [
        row
        | {
            "falls": end(row["losses"]) < end(row["losses"][::-1]),
            "differs": differ(row["losses"]),
        }
        for row in rows
    ]


def end(losses: Sequence[float]) -> float:
    """Returns the mean of the last five losses."""
    return math.fsum(losses[-5:]) / 5


def is_good(row: dict[str, Any]) -> bool:
    """Returns whether a run learns, and is quantized unless it is the reference."""
    return row["falls"] and row["differs"] == (row["policy"] != REFERENCE)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Returns the mean loss of the last five steps, by policy and model."""
    cells = {
        (row["policy"], row["model"]): f"{end(row['losses']):.4f}"
        + " (!)" * (not is_good(row))
        for row in rows
    }
    columns = dict.fromkeys(model for _, model in cells)
    head = [["policy", *(f"`{model}`" for model in columns)]]
    lines = [*head, ["---", *["---:"] * len(columns)]]
    for policy in dict.fromkeys(policy for policy, _ in cells):
        lines.append([f"`{policy}`", *(cells[policy, model] for model in columns)])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
