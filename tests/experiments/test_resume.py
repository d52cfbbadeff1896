"""A run that is killed or stopped, and goes on as if it had not been."""

import json
import os
import shutil
import signal

import numpy as np
import pytest


@pytest.fixture(scope="module")
def start(command):
    return lambda out, *flags: command(out, "--policies=ufp4", *flags)


@pytest.fixture(scope="module")
def undisturbed(start, finish, tmp_path_factory):
    """The results of a run that nothing happened to."""
    out = tmp_path_factory.mktemp("undisturbed") / "run"
    finish(start(out))
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


def is_saving(out):
    return any(out.glob("checkpoints/ufp4-0/*tmp*"))


def is_finishing(out):
    return (out / "checkpoints/ufp4-0/60").exists()


def test_killed_while_training_saving_and_finishing(
    start, finish, wait_for, is_training, undisturbed, tmp_path
):
    out = tmp_path / "run"
    for moment in (is_training, is_saving, is_finishing):
        process = start(out)
        wait_for(moment, out, process)
        process.kill()
        process.communicate()
    finish(start(out))
    assert_equal(out, undisturbed)


def test_a_signal_saves_and_tells_the_scheduler(
    start, finish, wait_for, is_training, undisturbed, tmp_path
):
    out = tmp_path / "run"
    process = start(out, "--stop-status=99")
    wait_for(is_training, out, process)
    process.send_signal(signal.SIGTERM)
    error = finish(process, status=99)
    assert "goes on" in error
    done = losses(out)
    (saved, *_) = sorted((out / "checkpoints/ufp4-0").iterdir(), reverse=True)
    assert done[-1][0] < 60 and max(map(int, os.listdir(saved.parent))) == done[-1][0]
    error = finish(start(out))
    assert f"goes on after step {done[-1][0]}" in error
    assert_equal(out, undisturbed)


def test_a_finished_run_is_not_trained_again(start, finish, undisturbed, tmp_path):
    out = tmp_path / "run"
    shutil.copytree(undisturbed, out)
    shutil.rmtree(out / "checkpoints")
    finish(start(out))
    assert not (out / "checkpoints").exists()
    assert_equal(out, undisturbed)


def test_records_that_are_lost_are_missed_and_leave_the_others_in_place(
    start, finish, undisturbed, tmp_path
):
    out = tmp_path / "run"
    shutil.copytree(undisturbed, out)
    (out / "trials.jsonl").unlink()
    shutil.rmtree(out / "checkpoints/ufp4-0/60")
    records = (out / "metrics.jsonl").read_text().splitlines(keepends=True)
    (out / "metrics.jsonl").write_text("".join(records[:40]))
    error = " ".join(finish(start(out)).split())
    assert "metrics.jsonl lacks 10 of the steps before" in error
    assert losses(out) == losses(undisturbed)[:40] + losses(undisturbed)[50:]
    assert lines(out, "trials.jsonl") == lines(undisturbed, "trials.jsonl")
    report = json.loads((out / "report.json").read_text())
    left = [loss for step, loss, _ in losses(undisturbed) if not 40 < step <= 50]
    assert report["policies"][0]["train_loss"] == pytest.approx(np.mean(left[10:]))


def test_another_configuration_is_refused(start, finish, undisturbed):
    error = finish(start(undisturbed, "--set=optim.lr=0.5"), status=2)
    assert "config.optim.lr=0.003, not 0.5" in error
