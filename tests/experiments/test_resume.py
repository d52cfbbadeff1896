"""A run that is killed or stopped, and goes on as if it had not been."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

FLAGS = [
    *("--policies=ufp4", "--alone", "--steps=60", "--resume=auto"),
    *("--set=model.num_layers=1", "--set=model.d_model=32", "--set=model.d_ff=32"),
    *("--set=model.head_dim=16", "--set=data.sequence_length=32"),
    *("--set=data.vocab_size=260", "--set=data.holdout=0.2"),
    *("--set=checkpoint.every=10", "--set=run.eval_every=30"),
]


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """Starts the command in a process of its own, with --out."""
    folder = tmp_path_factory.mktemp("resume")
    for i in range(40):
        sentence = f"Text {i} counts to {i * i}, and says so {i % 7} times. "
        (folder / f"{i}.txt").write_text(sentence * (3 + i % 5))
    environment = os.environ | {
        "XLA_FLAGS": "",
        "FP4JAX_CACHE": str(folder / "cache"),
        # Starting again compiles nothing.
        "JAX_COMPILATION_CACHE_DIR": str(folder / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }

    def start(out, *flags):
        argv = ["-m", "experiments.pretrain", f"--data={folder}", f"--out={out}"]
        return subprocess.Popen(
            [sys.executable, *argv, *FLAGS, *flags],
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


@pytest.fixture(scope="module")
def undisturbed(command, tmp_path_factory):
    """The results of a run that nothing happened to."""
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    process = command(out)
    _, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    return out


def lines(out, name):
    path = out / name
    return [json.loads(line) for line in path.read_text().splitlines()]


def losses(out):
    return [(r["step"], r["loss"], r["grad_norm"]) for r in lines(out, "metrics.jsonl")]


def assert_equal(out, undisturbed):
    assert losses(out) == losses(undisturbed)
    assert [step for step, _, _ in losses(out)] == list(range(1, 61))
    for name in ("trials.jsonl", "evaluations.jsonl"):
        assert lines(out, name) == lines(undisturbed, name)


def wait_for(condition, out, process):
    start = time.monotonic()
    while not condition(out):
        assert process.poll() is None and time.monotonic() < start + 240
        time.sleep(0.002)


def is_training(out):
    path = out / "metrics.jsonl"
    return path.exists() and path.read_text().count("\n") >= 13


def is_saving(out):
    return any(out.glob("checkpoints/ufp4-0/*tmp*"))


def is_finishing(out):
    return (out / "checkpoints/ufp4-0/60").exists()


def test_killed_while_training_saving_and_finishing(command, undisturbed, tmp_path):
    out = tmp_path / "run"
    for moment in (is_training, is_saving, is_finishing):
        process = command(out)
        wait_for(moment, out, process)
        process.kill()
        process.communicate()
    process = command(out)
    _, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    assert_equal(out, undisturbed)


def test_a_signal_saves_and_tells_the_scheduler(command, undisturbed, tmp_path):
    out = tmp_path / "run"
    process = command(out, "--stop-status=99")
    wait_for(is_training, out, process)
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=300)
    assert process.returncode == 99, error
    assert "goes on" in error
    done = losses(out)
    (saved, *_) = sorted((out / "checkpoints/ufp4-0").iterdir(), reverse=True)
    assert done[-1][0] < 60 and max(map(int, os.listdir(saved.parent))) == done[-1][0]
    process = command(out)
    _, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    assert f"goes on after step {done[-1][0]}" in error
    assert_equal(out, undisturbed)


def test_a_finished_run_is_not_trained_again(command, undisturbed, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(undisturbed, out)
    shutil.rmtree(out / "checkpoints")
    process = command(out)
    _, error = process.communicate(timeout=300)
    assert process.returncode == 0, error
    assert not (out / "checkpoints").exists()
    assert_equal(out, undisturbed)


def test_another_configuration_is_refused(command, undisturbed):
    process = command(undisturbed, "--set=optim.lr=0.5")
    _, error = process.communicate(timeout=300)
    assert process.returncode == 2
    assert "config.optim.lr=0.003, not 0.5" in error
