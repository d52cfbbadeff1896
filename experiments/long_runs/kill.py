"""Kills a run at random moments, and compares it with one that nothing happened to.

    python -m experiments.long_runs.kill --policies ufp4 --out kills.jsonl

Kills are spread over training, saving and finishing. A killed run goes on by the same
command with --resume=auto; all losses must be equal bit for bit at the end.
"""

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from experiments import terminal
from experiments.folder import read_log
from experiments.record import setting
from fp4jax.train import JsonLines

# A model so small that starting again is most of the time.
SMALL = (
    "model.num_layers=2",
    "model.d_model=64",
    "model.d_ff=128",
    "data.sequence_length=128",
    "checkpoint.every=10",
    "run.eval_every=100",
)
FLAGS = ("--alone", "--resume=auto", *(f"--set={assignment}" for assignment in SMALL))


def main(
    policies: str = "ufp4,ue5m3",
    kills: int = 20,
    steps: int = 400,
    seed: int = 0,
    out: Path | None = None,
) -> int:
    """Kills the runs of some policies, and says whether they ended as undisturbed.

    Args:
      policies: With commas between them; a run each.
      kills: Of every run.
      steps: Of every run.
      seed: Of the moments.
      out: New file for a record of every kill and of every comparison, as JSON lines.
    """
    if out is not None and out.exists():
        print(f"error: --out must be a new file, got {out}.", file=sys.stderr)
        return 2
    if kills < 1 or steps < 1:
        print(
            f"error: --kills and --steps must be at least 1, got {kills} and {steps}.",
            file=sys.stderr,
        )
        return 2
    rows, random_moments = [], random.Random(seed)
    for policy in policies.split(","):
        with tempfile.TemporaryDirectory() as folder:
            for row in _try(policy, kills, steps, random_moments, Path(folder)):
                print(json.dumps(row), flush=True)
                rows.append(row)
    if out is not None:
        with JsonLines(out) as log:
            for row in rows:
                log.write(row | setting())
    failed = [row for row in rows if row["event"] == "comparison" and not row["equal"]]
    print(f"{jax.devices()[0].device_kind}: runs that differ: {len(failed)}.")
    return int(bool(failed))


def _try(policy: str, kills: int, steps: int, moments: random.Random, folder: Path):
    """Yields a record of every kill of a run, and of the comparison."""
    argv = [f"--policies={policy}", f"--steps={steps}", *FLAGS]
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(folder / "compiled")}
    undisturbed, out = folder / "undisturbed", folder / "run"
    _start(argv, undisturbed, environment).wait()
    # The last fifth of the kills comes when all steps are done.
    training = sorted(moments.randrange(steps) for _ in range(kills - kills // 5))
    for number, step in enumerate(training + [steps] * (kills // 5)):
        process = _start(argv, out, environment)
        while count_steps(out) < step and process.poll() is None:
            time.sleep(0.001)
        time.sleep(moments.uniform(0, 2.0 if step == steps else 0.1))
        ended = process.poll() is not None
        process.kill()
        process.wait()
        yield {
            "event": "kill",
            "policy": policy,
            "number": number,
            "step": count_steps(out),
            "saving": any(out.glob("checkpoints/*/*tmp*")),
            "checkpoints": _checkpoints(out),
            "ended_before": ended,
        }
    status = _start(argv, out, environment).wait()
    found, expected = _results(out), _results(undisturbed)
    yield {
        "event": "comparison",
        "policy": policy,
        "kills": kills,
        "steps": len(found["metrics.jsonl"]),
        "status": status,
        "equal": found == expected and len(found["metrics.jsonl"]) == steps,
        "heldout_loss": _heldout_loss(found),
        "undisturbed_heldout_loss": _heldout_loss(expected),
    }


def _start(argv: Sequence[str], out: Path, environment: dict[str, str]):
    command = [sys.executable, "-m", "experiments.pretrain", f"--out={out}", *argv]
    with open(out.with_suffix(".txt"), "a", encoding="utf-8") as said:
        return subprocess.Popen(command, env=environment, stdout=said, stderr=said)


def count_steps(out: Path) -> int:
    """Returns how many steps the log of a run has."""
    path = out / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _checkpoints(out: Path) -> list[int]:
    names = [path.name for path in out.glob("checkpoints/*/*")]
    return sorted(int(name) for name in names if name.isdecimal())


def _results(out: Path) -> dict[str, list[dict[str, Any]]]:
    """Returns the logs of a run, without what is measured in time."""
    results = {}
    for name in ("metrics.jsonl", "evaluations.jsonl", "trials.jsonl"):
        times = ("tokens_per_s", "mfu", "data_wait")
        results[name] = [
            {key: value for key, value in row.items() if key not in times}
            for row in read_log(out / name)
        ]
    return results


def _heldout_loss(results: dict[str, list[dict[str, Any]]]) -> float | None:
    """Returns the loss at the end of a run; None if it did not end."""
    return next((row["heldout_loss"] for row in results["trials.jsonl"]), None)


if __name__ == "__main__":
    sys.exit(terminal.command(main))
