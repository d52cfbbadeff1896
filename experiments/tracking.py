"""The logs of a run for TensorBoard, beside the JSON lines that they come from."""

import math
import shutil
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from experiments import named

Row = Mapping[str, Any]
Trial = tuple[str, int]  # policy and seed

_FLUSH_S = 30


class TensorBoard:
    """Writes the numbers of logs as scalars, in a folder `POLICY-SEED` for each trial.

    The JSON lines are the truth: a trial that begins, or goes on after a kill, replaces
    its events by what they hold.

    Args:
      folder: made when the first trial begins.

    Raises:
      ImportError: tensorboardX is not installed.
    """

    def __init__(self, folder: Path):
        try:
            import tensorboardX
        except ImportError as error:
            raise ImportError(
                "--tensorboard: needs tensorboardX, which is not installed. Run: "
                "python -m pip install -e '.[track]'"
            ) from error
        self._make = tensorboardX.SummaryWriter
        self._folder = folder
        self._writers: dict[Trial, tensorboardX.SummaryWriter] = {}
        self._newest: dict[Trial, int] = {}

    def begin(self, policy: str, seed: int, logs: Mapping[str, Iterable[Row]]) -> None:
        """Drops the events of a trial, and writes those of its logs by name."""
        trial = (policy, seed)
        if (before := self._writers.pop(trial, None)) is not None:
            before.close()
        folder = self._folder / f"{named.file_name(policy)}-{seed}"
        shutil.rmtree(folder, ignore_errors=True)
        # A TensorBoard that is open now drops what it has shown from step 0 on.
        self._writers[trial] = self._make(
            str(folder), purge_step=0, flush_secs=_FLUSH_S
        )
        for name, rows in logs.items():
            for row in rows:
                self.write(name, row)

    def write(self, name: str, row: Row) -> None:
        """Writes a record of a log such as metrics.jsonl, of a trial that has begun."""
        trial = (row["policy"], row["seed"])
        step = row.get("step", self._newest.get(trial, 0))  # results have no step
        self._newest[trial] = max(step, self._newest.get(trial, 0))
        if (writer := self._writers.get(trial)) is None:
            return
        part = "train" if name == "metrics.jsonl" else "heldout"
        for tag, value in _numbers(row, part):
            writer.add_scalar(tag, value, step)

    def close(self) -> None:
        """Writes what is left."""
        for writer in self._writers.values():
            writer.close()
        self._writers.clear()


def _numbers(row: Row, prefix: str) -> Iterator[tuple[str, float]]:
    """Yields the finite numbers of nested rows, by names such as heldout/code/loss."""
    for name, value in row.items():
        if isinstance(value, Mapping):
            inside = prefix if name == "domains" else f"{prefix}/{name}"
            yield from _numbers(value, inside)
        elif name in ("policy", "seed", "step", "failed_checkpoints"):
            continue
        elif isinstance(value, bool | int | float) and math.isfinite(value):
            yield f"{prefix}/{name.removeprefix('heldout_')}", float(value)
