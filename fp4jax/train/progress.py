"""How a run shows on a terminal, and in a log file."""

from collections.abc import Mapping, Sequence
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar


class Progress:
    """A bar with loss and speed; where no one watches, about ten plain lines.

    Args:
      label: what is trained.
      steps: length of the run.
      console: where to write; standard error by default, which leaves standard output
        to results.

    Example:
      >>> console = Console(width=80, force_terminal=False)
      >>> with Progress("bf16", steps=1, console=console) as progress:
      ...     progress.update([{"step": 1, "loss": 6.25, "tokens_per_s": None}])
      bf16  step 1/1  loss 6.2500
    """

    def __init__(self, label: str, *, steps: int, console: Console | None = None):
        self._console = console or Console(stderr=True)
        self._label, self._steps = label, steps
        self._next_line = 0
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_interactive,
        )
        self._task = self._bar.add_task(label, total=steps, status="compiling")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_):
        self._bar.stop()

    def update(self, records: Sequence[Mapping[str, Any]]) -> None:
        """Shows the newest of `records`, which `train` has handed out."""
        newest = records[-1]
        step, status = newest["step"], _status(newest)
        if self._console.is_interactive:
            self._bar.update(self._task, completed=step, status=status)
        elif step >= self._next_line or step == self._steps:
            self._next_line = step + max(1, self._steps // 10)
            line = f"{self._label}  step {step}/{self._steps}  {status}"
            self._console.print(line, highlight=False)


def _status(record: Mapping[str, Any]) -> str:
    status = [f"loss {record['loss']:.4f}"]
    if (speed := record["tokens_per_s"]) is not None:
        status.append(f"{speed:,.0f} tokens/s")
    if (mfu := record.get("mfu")) is not None:
        status.append(f"{mfu:.1%} MFU")
    return "  ".join(status)
