"""A finished comparison as text: its table, its page, its files."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from experiments.ngram import SMOOTHING
from experiments.presets import CONTROL, REFERENCE
from experiments.record import write_json
from experiments.report import tables
from experiments.report.figures import plot
from experiments.report.summary import Baseline, BaselineRow, Report, Row, Trial

HEADER = ("", "train loss", "held-out loss", "bits/byte", "gap to BF16", "tokens/s")


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
    sections = [
        [_cells(row) for row in rows] for rows in (report.policies, report.baselines)
    ]
    return tables.terminal(
        HEADER, *sections, title="Loss of every policy", caption=caption(report)
    )


def markdown(report: Report, *, title: str, command: str) -> str:
    """Returns the report as a page: question, command, table, conclusion, figure."""
    rows = [_cells(row) for row in (*report.policies, *report.baselines)]
    return "\n\n".join(
        [
            f"# {title}",
            f"```\n{command}\n```",
            tables.markdown(HEADER, rows),
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
        f"{tables.counted(report.average, 'step')}."
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


def _cells(row: BaselineRow) -> tuple[str, ...]:
    """Returns the row as the text of its columns."""
    loss = tables.number(row.heldout_loss, row.heldout_spread)
    bits = tables.number(row.bits_per_byte)
    if not isinstance(row, Row):
        return row.name, "", loss, bits, "", ""
    spread = None if row.name == REFERENCE else row.gap_spread
    gap = tables.gap(row.gap, spread)
    return (
        row.name,
        tables.number(row.train_loss),
        loss,
        bits,
        gap,
        tables.speed(row.tokens_per_s),
    )
