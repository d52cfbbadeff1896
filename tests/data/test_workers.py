"""Worker processes change no batch, and one that dies is reported, not waited for."""

import dataclasses
import multiprocessing
import os
import signal
import time

import numpy as np
import pytest

from fp4jax.data import DataConfig, load_corpus, train_batches

START = 3


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("text")
    for i in range(30):
        (folder / f"{i}.txt").write_text(f"document {i}: " + "words, " * 3 * i)
    config = DataConfig(
        source=str(folder), tokenizer="bytes", vocab_size=257, sequence_length=16
    )
    return load_corpus(config), config


@pytest.fixture
def batches(made):
    corpus, config = made
    config = dataclasses.replace(config, workers=2)
    batches = train_batches(corpus, config, start=START)
    yield batches
    batches.close()


def test_workers_draw_the_same_batches_and_are_missed_when_killed(made, batches):
    alone = train_batches(*made, start=START)
    for _ in range(7):
        batch, expected = next(batches), next(alone)
        assert batch.keys() == expected.keys()
        for name, value in expected.items():
            np.testing.assert_array_equal(batch[name], value)
    assert batches.get_state() == alone.get_state() == {"next": START + 7}

    workers = multiprocessing.active_children()
    assert len(workers) == 2
    os.kill(workers[0].pid, signal.SIGKILL)
    start = time.monotonic()
    with pytest.raises(
        ChildProcessError, match="^train_batches: worker processes must"
    ):
        for _ in range(1000):
            next(batches)
    assert time.monotonic() - start < 60  # Grain looks every second, and waits for 25
    assert batches.get_state()["next"] >= START + 7


def test_damage_reaches_the_caller_of_a_worker(made):
    corpus, config = made
    (domain,) = corpus.domains
    domain.train.tokens._vocab_size = 50  # as if the shard held other tokens
    try:
        batches = train_batches(corpus, dataclasses.replace(config, workers=1))
        with pytest.raises(ValueError, match="every token must be below vocab_size=50"):
            next(batches)
    finally:
        domain.train.tokens._vocab_size = 257
