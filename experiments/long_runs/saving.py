"""What a checkpoint costs the steps around it.

    python -m experiments.long_runs.saving --model dense_125m --out saving.jsonl

cost = (time that save takes + excess of the steps until it is written) / (100 steps)
"""

import dataclasses
import itertools
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from experiments import named, terminal
from experiments.record import setting
from fp4jax import models, train

Timed = Callable[[Any], tuple[Any, float]]  # of a state: the next, and seconds


def main(
    model: str = "dense_125m",
    policy: str = "ufp4",
    rows: int = 2,
    length: int = 256,
    saves: int = 3,
    every: int = 100,
    out: Path | None = None,
) -> int:
    """Measures it.

    Args:
      model: From `fp4jax.models.PRESETS`.
      policy: As for experiments.pretrain.
      rows: Of a batch.
      length: Tokens of a row.
      saves: How often to measure.
      every: Steps between two checkpoints, that the cost is a part of.
      out: File to add the result to, as a JSON line.
    """
    timed, state = _trained(model, policy, rows, length)
    plain, costs, blocked, failures = _measured(timed, state, saves)
    mean, config = statistics.median(plain), models.PRESETS[model]
    result = {
        "model": dataclasses.asdict(config) | {"params": models.num_params(config)},
        "policy": policy,
        "tokens_per_step": rows * length,
        "step_s": mean,
        "step_spread_s": statistics.stdev(plain),
        "blocked_s": statistics.mean(blocked),
        "cost_s": statistics.mean(costs),
        "cost_of_steps": statistics.mean(costs) / (every * mean),
        "every": every,
        "failures": failures,
    }
    for name, value in result.items():
        print(f"{name}: {value}")
    if out is not None:
        with train.JsonLines(out) as log:
            log.write(result | setting())
    return int(failures > 0)


def _trained(model: str, policy: str, rows: int, length: int) -> tuple[Timed, Any]:
    """Returns what takes a step on one batch, and a state after a few of them."""
    config = models.PRESETS[model]
    tokens = np.random.default_rng(0).integers(
        0, config.vocab_size, (rows, length + 1), dtype=np.int32
    )
    batch = {
        "inputs": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "segment_ids": np.ones((rows, length), np.int32),
        "positions": np.tile(np.arange(length, dtype=np.int32), (rows, 1)),
        "loss_mask": np.ones((rows, length), np.float32),
    }
    optimizer = train.make_optimizer(train.OptimConfig(), steps=1000)
    whole = named.policy(policy, flag="--policy")(config)
    transformer = models.Transformer(config, whole, rngs=nnx.Rngs(0))
    graph, state = train.make_state(transformer, optimizer.transform)
    step = train.make_train_step(graph, optimizer)

    def timed(state: Any) -> tuple[Any, float]:
        start = time.perf_counter()
        state, metrics = step(state, batch)
        jax.block_until_ready(metrics)
        return state, time.perf_counter() - start

    for _ in range(3):
        state, _ = timed(state)
    return timed, state


def _measured(
    timed: Timed, state: Any, saves: int
) -> tuple[list[float], list[float], list[float], int]:
    """Returns seconds of plain steps, cost and wait of each save, and how many failed.

    Args:
      timed: takes a step of a state, and returns the next and the seconds it took.
      state: of training.
      saves: how often to measure.
    """
    plain, costs, blocked = [], [], []
    with tempfile.TemporaryDirectory() as folder:
        with train.Checkpoints(folder, config={}, keep_last=1) as checkpoints:
            checkpoints.save(state, data={})  # compiles
            checkpoints.wait()
            for _ in range(saves):
                for _ in range(5):
                    state, seconds = timed(state)
                    plain.append(seconds)
                start = time.perf_counter()
                assert checkpoints.save(state, data={})
                blocked.append(time.perf_counter() - start)
                during = []
                for _ in itertools.count():
                    state, seconds = timed(state)
                    during.append(seconds)
                    if not checkpoints.is_saving:
                        break
                excess = sum(during) - len(during) * statistics.median(plain)
                costs.append(blocked[-1] + excess)
            checkpoints.wait()
            return plain, costs, blocked, checkpoints.failures


if __name__ == "__main__":
    sys.exit(terminal.command(main))
