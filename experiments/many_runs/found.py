"""What the studies have found so far, all of them together."""

import dataclasses
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from experiments import study
from experiments.folder import Row, number, read_log
from experiments.many_runs.run import Run

_FOLDER = Path(__file__).parent.parent
STUDIES = ("pretrain_gap", "ablation", "scaling")
_FIELDS = (*(field.name for field in dataclasses.fields(Run)), "corpus", "heldout")


class Found:
    """Rows of results, each of one run; of a run that was repeated, the first counts.

    Args:
      rows: of results.

    Attributes:
      rows: each once.
    """

    def __init__(self, rows: Iterable[Row]):
        by_run = {Run.of(row): row for row in reversed(list(rows))}
        self.rows = list(reversed(by_run.values()))
        self._by_run = by_run

    @classmethod
    def of(cls, path: Path, *, corpus: str | None = None) -> "Found":
        """Returns what a file holds, and what all studies have found on the same text.

        Args:
          path: of the file.
          corpus: fingerprint of the text; None: that of the file, any if it is empty.

        Raises:
          ValueError: the file has runs on another text, or a line that is no run.
        """
        own = cls(_read(path)).rows
        texts = {row["corpus"] for row in own} | ({corpus} if corpus else set())
        if len(texts) > 1:
            raise ValueError(
                "--data: must be the text of the runs that are compared, those in "
                f"{str(path)!r}, got another. Name theirs, or another --out."
            )
        files = (_FOLDER / name / "results.jsonl" for name in STUDIES)
        rows = (row for file in files for row in _read(file))
        return cls([*own, *(r for r in rows if not texts or r["corpus"] in texts)])

    def row(self, run: Run) -> Row | None:
        """Returns the row of a run."""
        return self._by_run.get(run)

    def find(self, **fields: Any) -> list[Row]:
        """Returns the rows that have these values."""
        return study.matching(self.rows, **fields)

    def rows_of(self, runs: Iterable[Run]) -> list[Row]:
        """Returns the rows of some runs, of those that have one."""
        return [row for run in runs if (row := self.row(run)) is not None]


def _read(path: Path) -> list[Row]:
    """Returns the rows of a file, each of a run."""
    rows = read_log(path)
    for line, row in enumerate(rows, start=1):
        fields = row if isinstance(row, dict) else {}
        if missing := [name for name in _FIELDS if name not in fields]:
            raise ValueError(
                f"--out: line {line} of {str(path)!r} must be the result of a run, got "
                f"one without {', '.join(missing)}. Remove the line, or use another "
                "--out."
            )
    return rows


def loss(row: Row, domain: str = "all", forward: str = "bf16") -> float:
    """Returns the held-out loss of a row, in nats a token; NaN if the run diverged.

    A model whose forward pass is not quantized has one of them.
    """
    by_forward = row["heldout"]
    found = number(by_forward.get(forward, by_forward["bf16"])[domain]["loss"])
    return math.nan if row["diverged"] else found
