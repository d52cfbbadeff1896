"""Many steps in one go: memory that does not grow, and nothing compiled again.

python -m experiments.long_runs.endurance --steps 10000 --out endurance.jsonl
"""

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from experiments import terminal
from experiments.folder import Row, read_log
from experiments.long_runs.kill import SMALL, count_steps
from experiments.record import setting
from fp4jax.train import JsonLines

_MIB_OF_PAGE = os.sysconf("SC_PAGESIZE") / 2**20


def main(
    steps: int = 10000,
    warmup: int = 1500,
    policy: str = "ue5m3",
    model: str = "tiny",
    small: bool = True,
    out: Path | None = None,
) -> int:
    """Trains in a process of its own, and watches it.

    Args:
      steps: Of the run.
      warmup: Steps before memory and compilations count.
      policy: As for experiments.pretrain.
      model: From `fp4jax.models.PRESETS`.
      small: Shrinks the model to a very small one.
      out: File to add the result to, as a JSON line.
    """
    if not 0 <= warmup < steps:
        print(
            f"error: --warmup must be below --steps={steps}, got {warmup}.",
            file=sys.stderr,
        )
        return 2
    every = ("checkpoint.every=100", "run.eval_every=500")
    assignments = [*(SMALL if small else ()), *every]
    flags = [f"--model={model}", f"--policies={policy}", f"--steps={steps}", "--alone"]
    flags += [f"--set={assignment}" for assignment in assignments]
    run = _watched(flags)
    warm = [row for row in run.memory if row[1] >= warmup and row[2]]
    if not warm:
        print(
            f"error: the run must be seen once after --warmup={warmup}, got status "
            f"{run.status} at step {len(run.records)}. Give it more steps.",
            file=sys.stderr,
        )
        return run.status or 2
    result = {"policy": policy, "model": model, "small": small, **_figures(run, warm)}
    for name, value in result.items():
        print(f"{name}: {value}")
    if out is not None:
        with JsonLines(out) as log:
            log.write(result | setting())
    return run.status


class _Run(NamedTuple):
    """What is seen of a run.

    Attributes:
      status: with which its process ended.
      records: of its steps.
      saved: number of checkpoints that it kept.
      compiled: when something was compiled, in seconds.
      memory: second, steps done and resident MiB, once a second.
    """

    status: int
    records: list[Row]
    saved: int
    compiled: list[float]
    memory: list[tuple[float, int, float]]


def _watched(flags: Sequence[str]) -> _Run:
    """Trains with these flags of experiments.pretrain, and watches it."""
    compiled, memory = [], []
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run"
        process = subprocess.Popen(
            [sys.executable, "-m", "experiments.pretrain", f"--out={path}", *flags],
            env=os.environ | {"JAX_LOG_COMPILES": "1"},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        reader = threading.Thread(target=_watch, args=(process.stderr, compiled))
        reader.start()
        while process.poll() is None:
            time.sleep(1)
            memory.append((time.monotonic(), count_steps(path), _resident(process.pid)))
        reader.join()
        records = read_log(path / "metrics.jsonl")
        saved = len(list((path / "checkpoints").glob("*/*")))
    return _Run(int(process.returncode), records, saved, compiled, memory)


def _figures(run: _Run, warm: Sequence[tuple[float, int, float]]) -> Row:
    """Returns what a run comes to, of whose memory this part counts."""
    waits = [r["data_wait"] for r in run.records if r["data_wait"] is not None]
    return {
        "steps": len(run.records),
        "status": run.status,
        "checkpoints_kept": run.saved,
        "memory_mib": {
            step: round(mib, 1) for _, step, mib in warm[:: max(1, len(warm) // 20)]
        },
        "growth": max(mib for _, _, mib in warm) / warm[0][2] - 1,
        "compilations": len(run.compiled),
        "compilations_after_warmup": sum(when > warm[0][0] for when in run.compiled),
        "data_wait": sum(waits) / len(waits) if waits else None,
    }


def _watch(lines, compiled: list[float]) -> None:
    """Notes when something is compiled, from what a process says."""
    for line in lines:
        if "Finished XLA compilation" in line:
            compiled.append(time.monotonic())


def _resident(pid: int) -> float:
    """Returns the resident memory of a process in MiB; 0 once it has ended."""
    try:
        pages = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()[1]
    except OSError:
        return 0.0
    return int(pages) * _MIB_OF_PAGE


if __name__ == "__main__":
    sys.exit(terminal.command(main))
