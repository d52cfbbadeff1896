"""Trains with the library's random bits and with `jax.random.bits`, seed by seed.

    python -m experiments.first_light.random_bits --out results.json

The two runs of a seed have equal weights, batches and keys; only the source of the bits
of stochastic rounding differs. Sound bits give differences within the spread of seeds.
"""

import contextlib
import json
import math
import statistics
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path
from unittest import mock

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from experiments import presets, record, terminal, trial
from experiments.compare import Comparison
from experiments.folder import Folder
from experiments.stop import Stop
from fp4jax import data
from fp4jax.numerics import random_bits


def threefry16(words, row: jax.Array, column: jax.Array) -> jax.Array:
    """`random_bits.uniform16` from `jax.random.bits`; signs stay as they are."""
    shape = jnp.broadcast_shapes(row.shape, column.shape)
    if len(shape) < 2:
        return hashed16(words, row, column)
    key = jax.random.wrap_key_data(jnp.stack(words), impl="threefry2x32")
    return jax.random.bits(key, shape, jnp.uint32) >> 16


hashed16 = random_bits.uniform16
SOURCES = {"library": hashed16, "jax.random": threefry16}


@contextlib.contextmanager
def bits_from(source: str) -> Generator[None]:
    """Draws the bits of stochastic rounding from a source of `SOURCES`."""
    trial.compiled.cache_clear()
    with mock.patch.object(random_bits, "uniform16", SOURCES[source]):
        yield
    trial.compiled.cache_clear()


def main(
    policy: str = "ufp4", seeds: int = 3, steps: int = 300, out: Path | None = None
) -> None:
    """Compares two sources of random bits.

    Args:
      policy: What to train under.
      seeds: Runs with each source.
      steps: Of every run.
      out: File for the losses, as JSON.
    """
    config = presets.resolve(
        policy_names=[policy], alone=True, steps=steps, seeds=seeds
    )
    corpus = data.load_corpus(config.data)
    losses: dict[str, list[float]] = {}
    description = record.describe(config, corpus=corpus, command="")
    for source in SOURCES:
        with contextlib.ExitStack() as stack:
            path = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            stack.enter_context(bits_from(source))
            runs = Comparison(
                config=config,
                corpus=corpus,
                folder=stack.enter_context(Folder(path, description, resume=False)),
                description=description,
                stop=stack.enter_context(Stop()),
            )
            losses[source] = [found.heldout_loss for found in runs.trials()]
    ours, theirs = losses.values()
    difference = statistics.mean(a - b for a, b in zip(ours, theirs, strict=True))
    spread = statistics.stdev(ours) if seeds > 1 else math.nan
    table = Table("seed", *SOURCES, title=f"{policy}: held-out loss by source of bits")
    for seed, pair in enumerate(zip(ours, theirs, strict=True)):
        table.add_row(str(seed), *(f"{loss:.4f}" for loss in pair))
    Console().print(table)
    print(f"mean difference {difference:+.4f}, spread of seeds {spread:.4f}")
    if out:
        result = {
            "policy": policy,
            "steps": steps,
            "device": jax.devices()[0].device_kind,
            "heldout_loss": losses,
        }
        out.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(terminal.command(main))
