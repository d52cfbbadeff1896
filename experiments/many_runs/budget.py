"""What runs cost: measured where such a run was measured, and else expected."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from rich.table import Table

from experiments import study
from experiments.folder import Row, read_log
from experiments.many_runs.found import Found
from experiments.many_runs.run import Run
from fp4jax import models

SPEEDS = Path(__file__).parent / "speeds.jsonl"  # of `experiments.many_runs.speed`

# Of an H200's peak, in steps of models whose vectors have some hundred numbers; and how
# much longer a step takes that quantizes. Guesses until a row tells better.
_FLOPS, _QUANTIZED = 120e12, 1.6
_EVALUATION = 2.0  # seconds

RATE = 2e-3  # of runs whose learning rate is not known yet


def seconds(run: Run, found: Found, vocab_size: int = 8192) -> tuple[float, bool]:
    """Returns how long a run takes once compiled, and whether such a run was timed."""
    tokens = run.steps * run.rows * run.length
    kind = {"model": run.model, "policy": run.policy}
    speeds = [row["tokens_per_s"] for row in found.find(**kind)]
    if speeds:
        return tokens / max(speeds) + _EVALUATION, True
    timed = [row["tokens_per_s"] for row in study.matching(read_log(SPEEDS), **kind)]
    if timed:
        return tokens / max(timed) + _EVALUATION, False
    shape = run.shape(vocab_size)
    flops = tokens * models.flops_per_token(shape, sequence_length=run.length)
    slower = 1.0 if run.policy == "bf16" else _QUANTIZED
    return flops / _FLOPS * slower + _EVALUATION, False


def table(runs: Sequence[Run], found: Found) -> Table:
    """Returns the queue: every run, whether it is done, and its cost."""
    shown = Table("run", "M tokens", "lr", "seed", "s", "", title="Queue")
    left = 0.0
    for run in runs:
        cost, measured = seconds(run, found)
        done = found.row(run) is not None
        left += 0 if done else cost
        shown.add_row(
            f"{run.model} {run.policy}",
            f"{run.tokens / 1e6:.0f}",
            f"{run.lr:g}",
            f"{run.seed}.{run.noise}",
            f"{cost:.0f}",
            "done" if done else "" if measured else "expected",
        )
    shown.caption = f"{len(runs)} runs; {left / 60:.0f} minutes are left to do"
    return shown


def by_model(
    runs: Iterable[Run], found: Found
) -> list[tuple[str, int, float, int, float]]:
    """Returns for each model runs that are done, their minutes, and what is left."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(run.model, []).append(run)
    lines = []
    for model, group in groups.items():
        rows = found.rows_of(group)
        left = [run for run in group if found.row(run) is None]
        cost = sum(seconds(run, found)[0] for run in left) / 60
        lines.append((model, len(rows), minutes(rows), len(left), cost))
    return lines


def minutes(rows: Iterable[Row]) -> float:
    """Returns the time that runs took, that of lanes shared between them."""
    return sum(row["seconds"] / max(1, row["lanes"]) for row in rows) / 60
