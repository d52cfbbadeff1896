"""What runs cost: measured where such a run was measured, and else expected."""

from collections.abc import Iterable, Sequence

from rich.table import Table

from experiments.many_runs.found import Found
from experiments.many_runs.run import Run
from experiments.many_runs.shapes import SHAPES
from experiments.presets import REFERENCE
from experiments.report.tables import counted
from fp4jax import models

# FLOPs a second of an H200, and how much longer steps take that quantize, and those of
# mixtures: in pretrain_gap, dense_9m trained on 4.25M tokens/s in BF16 and on 3.45M
# under e2m1_ref, moe_11m on 4.4M in BF16. Smaller models reach fewer FLOPs.
_FLOPS, _QUANTIZED, _MIXTURE = 246e12, 1.23, 1.9
_EVALUATION = 2.0  # seconds

RATE = 2e-3  # of runs whose learning rate is not known yet


def seconds(run: Run, found: Found) -> tuple[float, bool]:
    """Returns how long a run takes once compiled, and whether such a run was timed."""
    tokens = run.steps * run.rows * run.length
    alike = found.find(model=run.model, policy=run.policy, rows=run.rows)
    speeds = [row["tokens_per_s"] for row in alike]
    if speeds:
        return tokens / max(speeds) + _EVALUATION, True
    shape = SHAPES[run.model]
    flops = tokens * models.flops_per_token(shape, sequence_length=run.length)
    slower = 1.0 if run.policy == REFERENCE else _QUANTIZED
    slower *= 1.0 if shape.moe is None else _MIXTURE
    return flops / _FLOPS * slower + _EVALUATION, False


def table(runs: Sequence[Run], found: Found) -> Table:
    """Returns the queue: every run, whether it is done, and its cost."""
    shown = Table("run", "M tokens", "lr", "seed.noise", "seconds", "", title="Queue")
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
            "done" if done else "as timed" if measured else "expected",
        )
    devices = {row["device"] for row in found.rows if "device" in row} or {"an H200"}
    shown.caption = (
        f"{counted(len(runs), 'run')}; {counted(round(left / 60), 'minute')} left on "
        f"{', '.join(sorted(devices))}; rates not known yet are taken as {RATE:g}"
    )
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
        spent = sum(row["seconds"] for row in rows) / 60
        lines.append((model, len(rows), spent, len(left), cost))
    return lines
