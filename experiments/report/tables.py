"""Rows of text as a table: for a terminal, in Markdown, in HTML."""

import html
import math
from collections.abc import Sequence

from rich.table import Table

Cells = Sequence[str]


def terminal(
    header: Cells, *sections: Sequence[Cells], title: str, caption: str
) -> Table:
    """Returns a table for a terminal; the first column is of names."""
    shown = Table(title=title, caption=caption, min_width=72)
    for i, name in enumerate(header):
        shown.add_column(name, justify="right" if i else "left", no_wrap=True)
    for rows in sections:
        for row in rows:
            shown.add_row(*row)
        shown.add_section()
    return shown


def markdown(header: Cells, rows: Sequence[Cells]) -> str:
    """Returns a table for a page of Markdown."""
    lines = [header, ("---", *["---:"] * (len(header) - 1)), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def markup(header: Cells, rows: Sequence[Cells]) -> str:
    """Returns a table for a page of HTML."""

    def line(tag: str, cells: Cells) -> str:
        inside = "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells)
        return f"<tr>{inside}</tr>"

    body = "\n".join(line("td", row) for row in rows)
    return f"<table>\n{line('th', header)}\n{body}\n</table>"


def counted(count: int, noun: str, plural: str = "") -> str:
    """Returns a count with its noun, whose plural ends in s unless it is given.

    Example:
      >>> counted(1, "seed"), counted(1200, "token"), counted(2, "policy", "policies")
      ('1 seed', '1,200 tokens', '2 policies')
    """
    return f"{count:,} {noun if count == 1 else plural or f'{noun}s'}"


def number(value: float | None, spread: float | None = None) -> str:
    """Returns a loss with its spread; nothing for None."""
    if value is None:
        return ""
    if not math.isfinite(value):
        return "diverged"
    return f"{value:.4f}" + ("" if spread is None else f" +- {spread:.4f}")


def percent(value: float) -> str:
    """Returns a gap with its sign."""
    return f"{value:+.2f}%" if math.isfinite(value) else "diverged"


def gap(value: float | None, spread: float | None = None) -> str:
    """Returns a gap with its spread; nothing for None."""
    if value is None:
        return ""
    return percent(value) + ("" if spread is None else f" +- {spread:.2f}")


def speed(value: float | None) -> str:
    """Returns tokens per second; nothing for None."""
    return "" if value is None else f"{value:,.0f}"
