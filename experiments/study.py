"""What studies have in common: rows that pieces add to, and a README made of them.

    results = Results(FOLDER / "results.jsonl")
    for piece in results.missing({"policy": name, "seed": 0} for name in names):
        results.add(piece | {"loss": ...})
    show(FOLDER / "README.md", {"losses": tables.markdown(HEADER, rows)})

A piece is the part of a row that says what was measured, in values of JSON. A command
that is stopped, or given further pieces, measures what is missing when started again.
"""

import contextlib
import fcntl
import os
import re
from collections.abc import Generator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from experiments import record
from experiments.folder import Row, read_log
from fp4jax.train import JsonLines


class Results:
    """The rows of a study: a file of JSON lines, each whole or not there.

    Args:
      path: of the file, which is made with the first row. A last line that was cut off
        is removed.

    Attributes:
      rows: that are there.

    Raises:
      ValueError: another line is no record.
    """

    def __init__(self, path: Path):
        self.path, self.rows = path, []
        # Once: rows that are added to a file of the repository make it differ from its
        # commit.
        setting = record.setting()
        self._stamp = {
            "git": setting["git"],
            "jax": setting["versions"]["jax"],
            "device": setting["device"]["kind"],
        }
        if path.exists():
            with _locked(path):
                _remove_cut_off(path)
                self.rows = read_log(path)

    def find(self, **fields: Any) -> list[Row]:
        """Returns the rows that have these values."""
        return matching(self.rows, **fields)

    def missing(self, pieces: Iterable[Row]) -> Iterator[Row]:
        """Yields the pieces of which there is no row, when their turn comes."""
        return (piece for piece in pieces if not self.find(**piece))

    def add(self, row: Mapping[str, Any]) -> None:
        """Adds a row, with the commit, the version of JAX and the device.

        A row that names them, as one made on another machine, keeps what it names.
        """
        row = self._stamp | dict(row)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(self.path), JsonLines(self.path) as file:
            _remove_cut_off(self.path)  # by another process, perhaps, since it was read
            file.write(row)
            self.rows = read_log(self.path)


@contextlib.contextmanager
def _locked(path: Path) -> Generator[None]:
    """Keeps a file from other processes that add rows to it."""
    with open(path, "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _remove_cut_off(path: Path) -> None:
    """Removes a last line that was not written to its end."""
    text = path.read_bytes()
    if (whole := text.rfind(b"\n") + 1) < len(text):
        os.truncate(path, whole)


def matching(rows: Iterable[Row], /, **fields: Any) -> list[Row]:
    """Returns the rows that have these values."""
    return [row for row in rows if fields.items() <= row.items()]


def show(readme: Path, parts: Mapping[str, str]) -> None:
    """Writes tables into a page, each where the page names it; all of it or nothing.

    Raises:
      ValueError: as `filled`.
    """
    text = filled(readme.read_text("utf-8"), parts)
    with record.whole(readme) as partial:
        partial.write_text(text, "utf-8")


def filled(page: str, parts: Mapping[str, str]) -> str:
    r"""Returns a page of Markdown with other text between pairs of markers.

    Args:
      page: has `<!-- NAME -->` and `<!-- end of NAME -->` around each part.
      parts: text by name.

    Raises:
      ValueError: the page does not have the markers of a part once.

    Example:
      >>> filled("<!-- t -->\nold\n<!-- end of t -->", {"t": "new"}).split("\n")
      ['<!-- t -->', 'new', '<!-- end of t -->']
    """
    for name, text in parts.items():
        first, last = f"<!-- {name} -->", f"<!-- end of {name} -->"
        pattern = f"{re.escape(first)}\n.*?{re.escape(last)}"
        if (count := len(re.findall(pattern, page, re.DOTALL))) != 1:
            raise ValueError(
                f"filled: the page must have {first!r} and {last!r} around a part, "
                f"once, got them {count} times. Add or remove lines."
            )
        part = f"{first}\n{text.strip()}\n{last}"
        page = re.sub(pattern, lambda _, part=part: part, page, flags=re.DOTALL)
    return page


def save(figure: Figure, path: Path, *panels: Axes) -> None:
    """Writes a figure as a PNG file, with a legend where something has a label."""
    for axes in panels:
        if axes.get_legend_handles_labels()[0] and axes.get_legend() is None:
            axes.legend(frameon=False)
        axes.spines[["top", "right"]].set_visible(False)
    with record.whole(path) as partial:
        figure.savefig(partial, dpi=110)
