"""What a comparison found: its rows, its verdict, and how they are shown."""

import dataclasses
import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from matplotlib.figure import Figure
from rich.table import Table

from experiments.ngram import SMOOTHING
from experiments.presets import CONTROL, REFERENCE
from experiments.record import write_json

T = TypeVar("T", bound="Baseline")

# The control counts as plainly worse from this many times the largest other gap on.
PLAINLY = 2.0

HEADER = ("", "train loss", "held-out loss", "bits/byte", "gap to BF16", "tokens/s")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Baseline:
    """A model fitted on the tokens of one run, by its loss on the held-out text.

    Attributes:
      seed: what it shares with the runs on the same batches.
      heldout_loss: nats per token; NaN if it diverged.
      bits_per_byte: the same loss per byte of text.
    """

    name: str
    seed: int
    heldout_loss: float
    bits_per_byte: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Trial(Baseline):
    """One run of a policy.

    Attributes:
      losses: training loss of every step.
      tokens_per_s: without compilation; None for a single step.
    """

    losses: tuple[float, ...]
    tokens_per_s: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class BaselineRow:
    """The fits of one order: means over seeds, and a sample standard deviation.

    Attributes:
      heldout_spread: None for a single seed, and where a loss is not finite.
    """

    name: str
    heldout_loss: float
    heldout_spread: float | None
    bits_per_byte: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row(BaselineRow):
    """The trials of one policy, likewise.

    gap = 100 (heldout_loss / heldout_loss of BF16 - 1), seed by seed

    Attributes:
      train_loss: mean of the last steps.
      gap: percent, infinite where a loss is not finite; None without the reference.
      gap_spread: None for a single seed, and where a gap is not finite.
    """

    train_loss: float
    gap: float | None
    gap_spread: float | None
    tokens_per_s: float | None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Report:
    """The rows of the table, and whether the comparison can be believed.

    Attributes:
      average: last steps, whose mean is the training loss.
      valid: the control is plainly worse than every other policy; None where the
        reference or the control did not train.
      verdict: the same as a sentence.
    """

    policies: tuple[Row, ...]
    baselines: tuple[BaselineRow, ...]
    average: int
    valid: bool | None
    verdict: str


def summarize(
    trials: Sequence[Trial], baselines: Sequence[Baseline], *, average: int
) -> Report:
    """Returns the report of a comparison.

    Args:
      trials: of policies, the reference and the control among them, all on the same
        seeds.
      baselines: of n-gram models on those seeds.
      average: last steps, whose mean is the training loss.
    """
    rows = tuple(_row(group, trials, average) for group in _by_name(trials))
    valid, verdict = judge(rows)
    return Report(
        policies=rows,
        baselines=tuple(BaselineRow(**_heldout(g)) for g in _by_name(baselines)),
        average=min(average, len(trials[0].losses)),
        valid=valid,
        verdict=verdict,
    )


def judge(rows: Sequence[Row]) -> tuple[bool | None, str]:
    """Returns whether the control is plainly worse than the rest, and a sentence.

    gap of the control > max(PLAINLY * m, m + s)

    with m the largest other gap, at least 0, and s the largest spread of any gap: a run
    in which quantization silently did nothing fails.
    """
    gaps = {row.name: row.gap for row in rows if row.gap is not None}
    if not gaps.keys() >= {REFERENCE, CONTROL}:
        return None, (
            f"Not compared: {REFERENCE} and the control ({CONTROL}) did not both train."
        )
    # The gap of BF16 to itself is 0, or infinite where BF16 itself diverged.
    largest = max(gap for name, gap in gaps.items() if name != CONTROL)
    spread = max(row.gap_spread or 0.0 for row in rows)
    bound = max(PLAINLY * largest, largest + spread)
    valid = gaps[CONTROL] > bound
    outcome = (
        f"The gap of the control ({CONTROL}) is {_percent(gaps[CONTROL])}, the largest "
        f"other {_percent(largest)}"
    )
    if valid:
        return True, f"{outcome}: quantization takes effect, and 2 bits lose plainly."
    return False, (
        f"DO NOT TRUST THIS COMPARISON. {outcome}, but the control's must exceed "
        f"{_percent(bound)}. Either the run is too short to tell policies apart, or "
        "quantization had no effect."
    )


def write(
    report: Report,
    trials: Sequence[Trial],
    baselines: Sequence[Baseline],
    folder: Path,
    *,
    title: str,
    command: str,
) -> None:
    """Writes report.json, report.md and loss.png; JSON has null for what diverged."""
    write_json(folder / "report.json", dataclasses.asdict(report))
    page = markdown(report, title=title, command=command)
    (folder / "report.md").write_text(page, encoding="utf-8")
    plot(trials, baselines, folder / "loss.png")


def table(report: Report) -> Table:
    """Returns the report as a table for a terminal."""
    shown = Table(title="Loss of every policy", caption=caption(report), min_width=72)
    for i, name in enumerate(HEADER):
        shown.add_column(name, justify="right" if i else "left", no_wrap=True)
    for row in report.policies:
        shown.add_row(*_cells(row))
    shown.add_section()
    for row in report.baselines:
        shown.add_row(*_cells(row))
    return shown


def markdown(report: Report, *, title: str, command: str) -> str:
    """Returns the report as a page: question, command, table, conclusion, figure."""
    rows = [HEADER, ("---", *["---:"] * (len(HEADER) - 1))]
    rows += [_cells(row) for row in (*report.policies, *report.baselines)]
    lines = [f"| {' | '.join(cells)} |" for cells in rows]
    return "\n\n".join(
        [
            f"# {title}",
            f"```\n{command}\n```",
            "\n".join(lines),
            caption(report),
            f"**{report.verdict}**",
            "![Training loss of every policy, and its gap to BF16](loss.png)\n",
        ]
    )


def caption(report: Report) -> str:
    """Returns what the columns of the table mean."""
    spread = any(row.heldout_spread is not None for row in report.policies)
    sentences = [
        "Losses in nats/token; the training loss is the mean of the last "
        f"{report.average} steps."
    ]
    if any(row.gap is not None for row in report.policies):
        sentences.append(
            "The gap is that of the held-out loss in percent of BF16's: positive is "
            "worse than BF16, negative better."
        )
    if spread:
        sentences.append("Means over seeds, +- the sample standard deviation.")
    if report.valid is not None:
        sentences.append(
            f"{CONTROL} is the control, 2 bits, which must be plainly worse."
        )
    if report.baselines:
        sentences.append(
            f"The n-grams ({SMOOTHING}) saw exactly the tokens that the models saw."
        )
    return " ".join(sentences)


def plot(trials: Sequence[Trial], baselines: Sequence[Baseline], path: Path) -> None:
    """Draws the smoothed training losses and their gaps to BF16; the mean over seeds.

    Args:
      trials: of policies.
      baselines: drawn as levels of held-out loss.
      path: of the PNG file.
    """
    figure = Figure(figsize=(10, 4), layout="constrained")
    losses, gaps = figure.subplots(1, 2)
    curves = {
        group[0].name: np.mean([smooth(trial.losses) for trial in group], axis=0)
        for group in _by_name(trials)
    }
    for name, curve in curves.items():
        steps = np.arange(1, len(curve) + 1)
        line = losses.plot(steps, curve, label=name, linewidth=1.2)[0]
        if name != REFERENCE and REFERENCE in curves:
            gap = 100 * (curve / curves[REFERENCE] - 1)
            gaps.plot(steps, gap, label=name, color=line.get_color(), linewidth=1.2)
    for group, style in zip(_by_name(baselines), ("--", ":"), strict=False):
        level = _heldout(group)["heldout_loss"]
        label = f"{group[0].name}, held out"
        losses.axhline(level, label=label, color="gray", linestyle=style, linewidth=1)
    losses.set(xlabel="step", ylabel="training loss, nats/token")
    gaps.set(xlabel="step", ylabel="gap to BF16, % (positive: worse)")
    gaps.axhline(0, color="black", linewidth=0.8)
    for axes in (losses, gaps):
        if axes.get_legend_handles_labels()[0]:
            axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)


def smooth(losses: Sequence[float], weight: float = 0.95) -> np.ndarray:
    """Returns the exponential moving average, free of the bias of its start.

    mean_i = sum_{j <= i} weight^(i - j) losses_j / sum_{j <= i} weight^(i - j)
    """
    total = count = 0.0
    means = []
    for loss in losses:
        total, count = weight * total + loss, weight * count + 1
        means.append(total / count)
    return np.array(means)


def _by_name(trials: Sequence[T]) -> list[list[T]]:
    groups = defaultdict(list)
    for trial in trials:
        groups[trial.name].append(trial)
    return list(groups.values())


def _heldout(group: Sequence[Baseline]) -> dict[str, Any]:
    """Returns the fields of a row that every kind of model has."""
    loss, spread = _mean_and_spread([trial.heldout_loss for trial in group])
    return {
        "name": group[0].name,
        "heldout_loss": loss,
        "heldout_spread": spread,
        "bits_per_byte": statistics.fmean(trial.bits_per_byte for trial in group),
    }


def _row(group: Sequence[Trial], trials: Sequence[Trial], average: int) -> Row:
    reference = {t.seed: t.heldout_loss for t in trials if t.name == REFERENCE}
    gap = spread = None
    if reference:
        gaps = [100 * (t.heldout_loss / reference[t.seed] - 1) for t in group]
        gap, spread = _mean_and_spread(
            [g if math.isfinite(g) else math.inf for g in gaps]
        )
    speeds = [t.tokens_per_s for t in group if t.tokens_per_s is not None]
    return Row(
        **_heldout(group),
        train_loss=statistics.fmean(np.mean(t.losses[-average:]) for t in group),
        gap=gap,
        gap_spread=spread,
        tokens_per_s=statistics.fmean(speeds) if speeds else None,
    )


def _mean_and_spread(values: Sequence[float]) -> tuple[float, float | None]:
    defined = len(values) > 1 and all(map(math.isfinite, values))
    return statistics.fmean(values), statistics.stdev(values) if defined else None


def _cells(row: BaselineRow) -> tuple[str, ...]:
    """Returns the row as the text of its columns."""
    heldout = f"{row.heldout_loss:.4f}"
    if row.heldout_spread is not None:
        heldout += f" +- {row.heldout_spread:.4f}"
    bits = f"{row.bits_per_byte:.4f}"
    if not isinstance(row, Row):
        return row.name, "", heldout, bits, "", ""
    gap = "" if row.gap is None else _percent(row.gap)
    if row.gap_spread is not None and row.name != REFERENCE:
        gap += f" +- {row.gap_spread:.2f}"
    speed = "" if row.tokens_per_s is None else f"{row.tokens_per_s:,.0f}"
    return row.name, f"{row.train_loss:.4f}", heldout, bits, gap, speed


def _percent(value: float) -> str:
    return f"{value:+.2f}%" if math.isfinite(value) else "diverged"
