"""Commands in processes of their own, and text for small models."""

import json
import os
import subprocess
import sys
import time

import numpy as np
import pytest

from fp4jax.data import DataConfig

LAUNCH = ["-m", "experiments.launch"]
FLAGS = [
    *("--alone", "--resume=auto", "--steps=60"),
    *("--set=model.num_layers=1", "--set=model.d_model=32", "--set=model.d_ff=32"),
    *("--set=model.head_dim=16", "--set=data.sequence_length=32"),
    *("--set=data.vocab_size=260", "--set=data.holdout=0.2"),
    *("--set=checkpoint.every=10", "--set=run.eval_every=30"),
]


@pytest.fixture(scope="session")
def command(tmp_path_factory):
    """Starts `experiments.pretrain` on a very small model, with --out."""
    folder = tmp_path_factory.mktemp("texts")
    for i in range(40):
        sentence = f"Text {i} counts to {i * i}, and says so {i % 7} times. "
        (folder / f"{i}.txt").write_text(sentence * (3 + i % 5))
    shared = os.environ | {
        "FP4JAX_CACHE": str(folder / "cache"),
        # Starting again compiles nothing.
        "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }

    def start(out, *flags, processes=1, code=None, cwd=None, **environment):
        program = ["-m", "experiments.pretrain"] if code is None else ["-c", code]
        argv = [sys.executable, *program]
        if processes > 1:
            argv = [sys.executable, *LAUNCH, f"--processes={processes}", "--", *argv]
        return subprocess.Popen(
            [*argv, f"--data={folder}", f"--out={out}", *FLAGS, *flags],
            env=shared | environment,
            cwd=cwd,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


@pytest.fixture(scope="session")
def together():
    """Runs code as two processes, which must succeed, and returns what they print."""

    def run(code):
        argv = [sys.executable, *LAUNCH, "--", sys.executable, "-c", code]
        found = subprocess.run(argv, capture_output=True, text=True, timeout=120)
        assert found.returncode == 0, found.stderr
        return found.stdout

    return run


@pytest.fixture(scope="session")
def finish():
    """Waits for the end of a command, which must succeed, and returns what it said."""

    def wait(process, *, status=0):
        _, error = process.communicate(timeout=300)
        assert process.returncode == status, error
        return error

    return wait


@pytest.fixture(scope="session")
def wait_for():
    """Waits until a condition of the folder holds, while the command still runs."""

    def wait(condition, out, process):
        start = time.monotonic()
        while not condition(out):
            assert process.poll() is None and time.monotonic() < start + 240
            time.sleep(0.002)

    return wait


@pytest.fixture(scope="session")
def is_training():
    """Whether the log of a folder has a record of step 13."""

    def condition(out):
        path = out / "metrics.jsonl"
        return path.exists() and path.read_text().count("\n") >= 13

    return condition


@pytest.fixture(scope="session")
def bytes_of_two(tmp_path_factory):
    """Returns how to read a small mixture of two domains, as bytes."""
    folder = tmp_path_factory.mktemp("text")
    words = "the scale of a block follows from its largest magnitude".split()
    rng = np.random.default_rng(0)
    for name in ("one", "two"):
        texts = (" ".join(rng.choice(words, 60)) for _ in range(60))
        (folder / f"{name}.txt").write_text("\n\0\n".join(texts))
    domains = [
        {"name": name, "source": f"{name}.txt", "weight": weight}
        for name, weight in (("one", 1), ("two", 2))
    ]
    path = folder / "mixture.json"
    path.write_text(json.dumps({"domains": domains}))
    return DataConfig(source=str(path), tokenizer="bytes", vocab_size=257)
