"""How many tokens a second one process draws from tokenized shards.

python -m experiments.data_speed
python -m experiments.data_speed --data tokens --workers 2
"""

import dataclasses
import itertools
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from fp4jax import data
from fp4jax.data import DataConfig, shards

_DOMAINS = {"english": 3.0, "code": 1.0}
_VOCAB_SIZE = 2**15
_MEAN_DOCUMENT = 1000  # tokens
_WARM_UP = 8  # batches, more than are prepared ahead


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Measures how many tokens a second one process draws from tokenized shards.

    Draws shuffled batches as training does, whole and in order, and prints one JSON
    line, which it also appends to a file. Without --data, it reads a mixture of two
    domains of random tokens, made in a temporary folder.
    """

    data: str = ""
    """folder made by experiments.tokenize; by default random tokens."""
    tokens: int = 2**26
    """random tokens to make, if there is no --data."""
    sequence_length: int = 2048
    """tokens a row."""
    batch_size: int = 32
    """rows a batch."""
    workers: int = DataConfig.workers
    """processes that prepare batches; 0: a thread."""
    seconds: float = 10.0
    """how long to draw."""
    out: str = "runs/data_speed.jsonl"
    """file that gets the line."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    arguments = tyro.cli(Arguments, prog="python -m experiments.data_speed", args=argv)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            folder = Path(arguments.data or scratch)
            if not arguments.data:
                write_random(folder, arguments.tokens)
            line = json.dumps(measure(arguments, folder))
        out = Path(arguments.out)
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open("a", encoding="utf-8") as stream:
            stream.write(line + "\n")
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(line)
    return 0


def measure(arguments: Arguments, folder: Path) -> dict[str, Any]:
    """Draws batches for some seconds; returns the speed and what it was measured on."""
    config = DataConfig(
        source=str(folder),
        sequence_length=arguments.sequence_length,
        batch_size=arguments.batch_size,
        workers=arguments.workers,
    )
    config = dataclasses.replace(config, **data.decided_by_source(config))
    corpus = data.load_corpus(config)
    start = time.perf_counter()
    batches = data.train_batches(corpus, config)
    next(batches)
    first = time.perf_counter()
    for _ in itertools.islice(batches, _WARM_UP):
        pass
    warm, count = time.perf_counter(), 0
    while (now := time.perf_counter()) - warm < arguments.seconds:
        next(batches)
        count += 1
    batches.close()
    drawn = count * config.batch_size * config.sequence_length
    return {
        "tokens_per_s": round(drawn / (now - warm)),
        "first_batch_s": round(first - start, 3),
        "batches": count,
        "sequence_length": config.sequence_length,
        "batch_size": config.batch_size,
        "workers": config.workers,
        "train_tokens": corpus.num_train_tokens,
        "documents": sum(len(domain.train) for domain in corpus.domains),
        "domains": len(corpus.domains),
        "source": arguments.data or "random",
        "cores": len(os.sched_getaffinity(0)),
        "python": platform.python_version(),
        **{name: metadata.version(name) for name in ("numpy", "grain")},
    }


def write_random(folder: Path, num_tokens: int) -> None:
    """Writes a tokenized folder of two domains with documents of many lengths."""
    generator = np.random.default_rng(0)
    domains = []
    for name, weight in _DOMAINS.items():
        splits = {}
        for split, part in (("train", 0.98), ("heldout", 0.02)):
            writer = shards.ShardWriter(
                folder,
                f"{name}/{split}",
                vocab_size=_VOCAB_SIZE,
                size=max(num_tokens // 8, 1),
            )
            left = int(part * num_tokens / len(_DOMAINS))
            while left > 0:
                size = int(generator.exponential(_MEAN_DOCUMENT)) + 2
                document = generator.integers(_VOCAB_SIZE - 1, size=size)
                document[-1] = _VOCAB_SIZE - 1  # <|endoftext|>
                writer.append(document)
                left -= size
            splits[split] = writer.finish()
        domains.append({"name": name, "weight": weight, **splits})
    shards.write_index(
        folder,
        {
            "tokenizer": "bytes",
            "vocab_size": _VOCAB_SIZE,
            "holdout": 0.02,
            "domains": domains,
        },
    )


if __name__ == "__main__":
    sys.exit(main())
