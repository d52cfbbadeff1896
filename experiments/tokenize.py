"""Tokenizes text once, into a folder that training maps instead of reading text.

python -m experiments.tokenize --data my/texts --out tokens
python -m experiments.pretrain --data tokens
"""

import dataclasses
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from experiments import record
from experiments.terminal import console
from fp4jax import data
from fp4jax.data import DataConfig

_VOCAB_SIZES = {"bpe": 2**15, "bytes": 257}  # and of a tokenizer.json, what it needs
_REFRESH_S = 0.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Tokenizes text once, into a folder that training maps instead of reading text.

    - The folder decides vocabulary and split: experiments.pretrain --data FOLDER adopts
      them, and draws the same batches as it would from the text itself.
    - Memory grows with the number of documents, by about 160 bytes for each, and not
      with their length. It holds 4096 characters for each token that BPE learns, and
      less than 1 GB besides.
    - The folder appears whole at the end, or not at all. Wrong arguments or data are
      one error and exit status 2.
    """

    data: str
    """stdlib; a file or folder of *.txt, *.jsonl, *.jsonl.gz, *.jsonl.zst, *.parquet or
    *.array_record; hf:OWNER/NAME[/CONFIG]; or *.json, a mixture of weighted domains."""
    out: str
    """new or empty folder."""
    vocab_size: int = 0
    """ids, <|endoftext|> included; 0: 32768 for bpe, else what the tokenizer has."""
    tokenizer: str = "bpe"
    """bpe (learned from the text), bytes, or path of a byte-level tokenizer.json."""
    text_field: str = DataConfig.text_field
    """field of a record that holds its text."""
    site_packages: bool = DataConfig.site_packages
    """with stdlib, adds the sources of the installed packages."""
    holdout: float = DataConfig.holdout
    """part of the documents that is never trained on, chosen by their hash."""


class Shown:
    """Draws the progress of every pass over the documents."""

    def __init__(self, progress: Progress):
        self._progress, self._drawn = progress, 0.0
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, what: str, done: int, total: int | None) -> None:
        """Takes `fp4jax.data` progress: what is done, to how many documents."""
        now = time.monotonic()
        if what not in self._tasks:
            self.finish()
            self._tasks[what] = self._progress.add_task(what, total=total)
        elif now - self._drawn < _REFRESH_S:
            return
        self._progress.update(self._tasks[what], completed=done, total=total)
        self._drawn = now

    def finish(self) -> None:
        """Marks all that was begun as done."""
        for task in self._progress.tasks:
            if not task.finished:
                done = max(task.completed, 1)
                done = task.total if task.total is not None else done
                self._progress.update(task.id, completed=done, total=done)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    arguments = tyro.cli(Arguments, prog="python -m experiments.tokenize", args=argv)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    start = time.monotonic()
    try:
        with Progress(*columns, console=Console(stderr=True)) as progress:
            shown = Shown(progress)
            index = tokenize(arguments, shown)
            shown.finish()
    except (ValueError, ImportError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted: nothing is left behind.", file=sys.stderr)
        return 130
    console(100).print(table(index))
    seconds = time.monotonic() - start
    print(f"{arguments.out}: vocabulary {index['vocab_size']}, {seconds:.1f} s")
    return 0


def tokenize(arguments: Arguments, progress: data.Progress) -> dict[str, Any]:
    """Writes the folder and returns its index.

    Raises:
      ValueError: arguments or data that cannot be used.
      ImportError: a library that reads the data is not installed.
      OSError: the folder cannot be written.
    """
    out = Path(arguments.out)
    record.check_free(out)
    config = DataConfig(
        source=arguments.data,
        text_field=arguments.text_field,
        site_packages=arguments.site_packages,
        tokenizer=arguments.tokenizer,
        holdout=arguments.holdout,
    )
    needed = data.decided_by_source(config).get("vocab_size", 2**15)
    size = arguments.vocab_size or _VOCAB_SIZES.get(arguments.tokenizer, needed)
    config = dataclasses.replace(config, vocab_size=size)
    return data.write_corpus(config, out, progress=progress)


def table(index: dict[str, Any]) -> Table:
    """Returns what every domain holds, for people."""
    found = Table("domain", "weight", "split")
    for name in ("documents", "tokens", "bytes/token", "shards"):
        found.add_column(name, justify="right")
    for domain in index["domains"]:
        for name in ("train", "heldout"):
            split = domain[name]
            found.add_row(
                domain["name"],
                f"{domain['weight']:g}",
                name,
                f"{split['documents']:,}",
                f"{split['tokens']:,}",
                f"{split['bytes'] / split['tokens']:.3f}",
                f"{len(split['shards'])}",
            )
    return found


if __name__ == "__main__":
    sys.exit(main())
