"""The folder of a comparison: its logs and checkpoints, and how it goes on."""

import copy
import fcntl
import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import IO, Any, Self

import jax

from experiments import agreement, named, record
from experiments.tracking import TensorBoard
from fp4jax import train
from fp4jax.train.checkpoint import config_differences

Row = dict[str, Any]

# Settings that may change from one part of a run to the next, as they change no loss,
# or as the hash of the corpus tells whether they do: paths, which may be moved.
FREE = ("checkpoint", "data.source", "data.tokenizer", "data.workers")


class Folder:
    """Where a comparison writes. One command at a time may have it open.

    - config.json: what is compared; tokenizer.json: of its text, unless it is bytes.
    - metrics.jsonl: a record of every step; evaluations.jsonl: of every evaluation.
    - trials.jsonl: a record of every trial that is finished; baselines.jsonl: of the
      models that stand beside them.
    - checkpoints/POLICY-SEED: of every trial.

    Of several processes only the first one writes; the others read what it has written
    before.

    Args:
      path: new or empty, or with `resume` that of a comparison.
      description: from `record.describe`.
      resume: go on with what is there; begin anew if nothing is.
      tracker: gets the records of all logs too.

    Raises:
      ValueError: the folder is in use, cannot be made, holds something else, or a
        comparison of another config, with the fields that differ; or processes do not
        share it.
    """

    def __init__(
        self,
        path: Path,
        description: Row,
        *,
        resume: bool,
        tracker: TensorBoard | None = None,
    ):
        self.path, self._tracker = path, tracker
        self._is_writer = jax.process_index() == 0
        with agreement.agreed():
            if self._is_writer:
                self._lock = _opened(path, description, resume=resume)
        with agreement.agreed():
            _check_shared(path)
        self._finished = {
            (row["policy"], row["seed"]): row for row in read_log(path / "trials.jsonl")
        }
        self._logs: dict[str, train.JsonLines] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_):
        for log in self._logs.values():
            log.close()
        if self._tracker is not None:
            self._tracker.close()
        if self._is_writer:
            self._lock.close()

    def keep_tokenizer(self, text: str) -> None:
        """Keeps the JSON of the tokenizer, with which the models can be used alone."""
        if self._is_writer and text:
            (self.path / "tokenizer.json").write_text(text, encoding="utf-8")

    def checkpoints(self, policy: str, seed: int) -> Path:
        """Returns the folder of the checkpoints of a trial."""
        return self.path / "checkpoints" / f"{named.file_name(policy)}-{seed}"

    def finished(self, policy: str, seed: int) -> Row | None:
        """Returns what `finish` has kept of a trial, or None."""
        return self._finished.get((policy, seed))

    def finish(self, row: Row) -> None:
        """Keeps the result of a trial, with its `policy` and `seed`."""
        self.write("trials.jsonl", row)
        self._finished[row["policy"], row["seed"]] = row

    @property
    def failed_checkpoints(self) -> int:
        """How many checkpoints of finished trials could not be written."""
        return sum(row["failed_checkpoints"] for row in self._finished.values())

    def write(self, name: str, row: Row) -> None:
        """Writes a record to a log of this folder."""
        if not self._is_writer:
            return
        if name not in self._logs:
            path = self.path / name
            if path.exists():
                _rewrite(path, read_log(path))  # ends a line that was cut off
            self._logs[name] = train.JsonLines(path)
        self._logs[name].write(row)
        if self._tracker is not None:
            self._tracker.write(name, row)

    def rows(self, name: str, policy: str, seed: int) -> list[Row]:
        """Returns the records of a trial in a log."""
        return [
            row
            for row in read_log(self.path / name)
            if (row["policy"], row["seed"]) == (policy, seed)
        ]

    def rewind(self, policy: str, seed: int, *, step: int) -> None:
        """Drops the records of a trial that come after a step."""
        if not self._is_writer:
            return
        names = ("metrics.jsonl", "evaluations.jsonl")
        for name in names:
            if (log := self._logs.pop(name, None)) is not None:
                log.close()
            path = self.path / name
            if path.exists():
                rows = read_log(path)
                _rewrite(
                    path,
                    (
                        row
                        for row in rows
                        if (row["policy"], row["seed"]) != (policy, seed)
                        or row["step"] <= step
                    ),
                )
        if self._tracker is not None:
            logs = {name: self.rows(name, policy, seed) for name in names}
            self._tracker.begin(policy, seed, logs)


def _opened(path: Path, description: Row, *, resume: bool) -> IO[str]:
    """Returns the lock of a folder, which is made if it is new."""
    is_new = not (path / "config.json").exists()
    if is_new or not resume:
        record.check_free(path)
    if is_new:
        record.create(path, description)
    lock = _lock(path)
    try:
        _check_same(path, description)
    except ValueError:
        lock.close()
        raise
    return lock


def _check_shared(path: Path) -> None:
    """Raises ValueError where a folder that another process has made is not there."""
    if not (path / "config.json").exists():
        raise ValueError(
            f"--out: must be a folder that all processes share, got {str(path)!r}, "
            "which process 0 has made and this one does not see. Name one on a file "
            "system that all of them have."
        )


def _lock(path: Path) -> IO[str]:
    """Returns an open file that no other process may lock until it is closed."""
    file = open(path / ".lock", "w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise ValueError(
            f"--out: must be a folder that no other command writes to, got "
            f"{str(path)!r}. Wait for the other, or stop it."
        ) from None
    return file


def _check_same(path: Path, description: Row) -> None:
    """Raises ValueError where a folder is that of another comparison."""
    file = path / "config.json"
    try:
        found = identity(json.loads(file.read_text(encoding="utf-8")))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"--resume: {str(file)!r} must be the configuration of a run, got "
            f"{error!r}. Restore it, or use another --out."
        ) from error
    wanted = identity(json.loads(json.dumps(description)))
    differences = config_differences(found, wanted)
    if differences:
        raise ValueError(
            "--resume: the configuration must be that of the run, which has "
            f"{'; '.join(differences)}. Use the same, or another --out."
        )


def of_processes(path: Path, description: Mapping[str, Any]) -> Row:
    """Returns what all processes of a run must have alike, or wait in vain."""
    checkpoint = description["config"]["checkpoint"]
    return (
        {"--out": str(path.absolute())}
        | identity(description)
        | {"checkpoint": checkpoint}
    )


def identity(description: Mapping[str, Any]) -> Row:
    """Returns the part of a description that decides the losses."""
    config = copy.deepcopy(dict(description["config"]))
    for path in FREE:
        section, _, field = path.partition(".")
        if field:
            config.get(section, {}).pop(field, None)
        else:
            config.pop(section, None)
    return {
        "config": config,
        "policies": description["policies"],
        "corpus": description["corpus"],
    }


def read_log(path: Path) -> list[Row]:
    """Returns the records of a log; a last one that was cut off is none.

    Raises:
      ValueError: any other line is no record, as after a crash of the machine.
    """
    if not path.exists():
        return []
    rows = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            rows.append(json.loads(line))
        except ValueError as error:
            raise ValueError(
                f"read_log: line {number} of {str(path)!r} must be a JSON record, got "
                f"{line[:40]!r}. Remove the line."
            ) from error
    return rows


def _rewrite(path: Path, rows: Iterable[Row]) -> None:
    text = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows)
    with record.whole(path) as partial:
        partial.write_text(text, encoding="utf-8")


def number(value: float | None) -> float:
    """Returns the number that a log has written; NaN for its null."""
    return math.nan if value is None else value
