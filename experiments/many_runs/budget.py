"""What runs cost: measured where such a run was measured, and else expected."""

from collections.abc import Sequence

from rich.table import Table

from experiments.folder import Row
from experiments.many_runs.run import Run
from experiments.study import Results
from fp4jax import models

# Of an H200's peak, in steps of models whose vectors have some hundred numbers; and how
# much longer a step takes that quantizes. Guesses until a row tells better.
_FLOPS, _QUANTIZED = 120e12, 1.6
_EVALUATION = 2.0  # seconds


def seconds(run: Run, results: Results, vocab_size: int = 8192) -> tuple[float, bool]:
    """Returns how long a run takes once compiled, and whether such a run was timed."""
    tokens = run.steps * run.rows * run.length
    kind = {"model": run.model, "policy": run.policy}
    speeds = [row["tokens_per_s"] for row in results.find(**kind)]
    if speeds:
        return tokens / max(speeds) + _EVALUATION, True
    shape = run.shape(vocab_size)
    flops = tokens * models.flops_per_token(shape, sequence_length=run.length)
    slower = 1.0 if run.policy == "bf16" else _QUANTIZED
    return flops / _FLOPS * slower + _EVALUATION, False


def table(runs: Sequence[Run], results: Results) -> Table:
    """Returns the queue: every run, whether it is done, and its cost."""
    shown = Table("run", "M tokens", "lr", "seed", "s", "", title="Queue")
    left = 0.0
    for run in runs:
        cost, measured = seconds(run, results)
        done = bool(results.find(**run.piece))
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


def minutes(rows: Sequence[Row]) -> float:
    """Returns how long the runs of some rows took, each counted once."""
    return sum(row["seconds"] / max(1, row["lanes"]) for row in rows) / 60
