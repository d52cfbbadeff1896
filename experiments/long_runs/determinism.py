"""Whether equal runs are equal bit for bit on this device, and what that costs.

    python -m experiments.long_runs.determinism --out determinism.jsonl

Trains twice under each setting of XLA, in processes of their own that compile anew.
"""

import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from experiments import terminal
from experiments.folder import read_log
from experiments.record import setting
from fp4jax.train import JsonLines

SETTINGS = (
    "",
    "--xla_gpu_exclude_nondeterministic_ops=true",
    "--xla_gpu_deterministic_ops=true",
)


def main(
    model: str = "dense_35m",
    policy: str = "ufp4",
    steps: int = 60,
    batch_size: int = 64,
    sequence_length: int = 512,
    out: Path | None = None,
) -> int:
    """Trains and compares.

    Args:
      model: From `fp4jax.models.PRESETS`.
      policy: As for experiments.pretrain.
      steps: Of every run.
      batch_size: Rows of a batch.
      sequence_length: Tokens of a row.
      out: File to add the results to, as JSON lines.
    """
    rows = []
    for flags in SETTINGS:
        runs = []
        for _ in range(2):
            with tempfile.TemporaryDirectory() as folder:
                command = [sys.executable, "-m", "experiments.pretrain", "--alone"]
                command += [f"--model={model}", f"--policies={policy}"]
                command += [f"--steps={steps}", f"--out={folder}/run"]
                command += [f"--set=data.batch_size={batch_size}"]
                command += [f"--set=data.sequence_length={sequence_length}"]
                environment = os.environ | {"XLA_FLAGS": flags}
                subprocess.run(command, env=environment, check=True)
                runs.append(read_log(Path(folder, "run", "metrics.jsonl")))
        losses = [[(r["loss"], r["grad_norm"]) for r in run] for run in runs]
        speeds = [r["tokens_per_s"] for run in runs for r in run if r["tokens_per_s"]]
        row = {
            "flags": flags,
            "equal": losses[0] == losses[1],
            "tokens_per_s": statistics.median(speeds),
            "model": model,
            "policy": policy,
            "steps": steps,
            "tokens_per_step": batch_size * sequence_length,
        }
        rows.append(row)
        print(row)
    if out is not None:
        with JsonLines(out) as log:
            for row in rows:
                log.write(row | setting())
    return 0


if __name__ == "__main__":
    sys.exit(terminal.command(main))
