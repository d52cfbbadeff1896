"""The report of runs as one HTML page that needs nothing beside it."""

import base64
import html
import io
from collections.abc import Sequence
from string import Template

from matplotlib.figure import Figure

from experiments.presets import REFERENCE
from experiments.report import evaluations, tables
from experiments.report.runs import ALL, Group
from experiments.report.standings import CAPTION, HEADER, Standing, verdict

_PAGE = Template("""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<title>$title</title>
<style>
body { font: 15px/1.5 sans-serif; margin: 2em auto; max-width: 75em; padding: 0 1em; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid #ccc; padding: 0.2em 0.7em; text-align: right; }
th:first-child, td:first-child { text-align: left; }
img { max-width: 100%; }
pre { background: #f4f4f4; padding: 0.7em; white-space: pre-wrap; }
.note { color: #555; max-width: 55em; }
</style>
</head>
<body>
<h1>$title</h1>
$sections
</body>
</html>
""")


def page(title: str, sections: Sequence[str]) -> str:
    """Returns the page of sections, from `section`."""
    return _PAGE.substitute(title=html.escape(title), sections="\n".join(sections))


def section(
    group: Group, rows: Sequence[Standing], pictures: Sequence[tuple[str, bytes]]
) -> str:
    """Returns what is known of one group: setting, table, figures.

    Args:
      group: of trials that can be compared.
      rows: where its policies stand.
      pictures: descriptions, and PNG files.
    """
    parts = [f"<h2>{html.escape(', '.join(group.names))}</h2>"]
    parts += [_setting(description) for description in group.descriptions]
    parts += [
        tables.markup(HEADER, [row.cells for row in rows]),
        f'<p class="note">{html.escape(CAPTION)}</p>',
        f"<p><strong>{html.escape(verdict(group, rows))}</strong></p>",
    ]
    parts += [
        f'<p><img src="{_uri(data)}" alt="{html.escape(text)}"></p>'
        for text, data in pictures
    ]
    if domains := [name for name in group.domains if name != ALL]:
        header = ("held-out gap", *domains)
        cells = [
            (row.name, *(tables.gap(*row.domains[name]) for name in domains))
            for row in rows
            if row.name != REFERENCE
        ]
        parts.append(tables.markup(header, cells))
    if group.evaluations:
        parts.append(tables.markup(*evaluations.table(group.evaluations)))
        caption = evaluations.caption(group.evaluations)
        parts.append(f'<p class="note">{html.escape(caption)}</p>')
    return "\n".join(parts)


def png(figure: Figure) -> bytes:
    """Returns a figure as a PNG file."""
    found = io.BytesIO()
    figure.savefig(found, format="png", dpi=130)
    return found.getvalue()


def _setting(description) -> str:
    device, git = description["device"], description["git"]
    found = ", ".join(f"{k} {v}" for k, v in description["versions"].items())
    text = f"{device['count']} x {device['kind']}; {found}; commit {git}"
    return (
        f"<pre>{html.escape(description['command'])}</pre>"
        f'<p class="note">{html.escape(text)}</p>'
    )


def _uri(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"
