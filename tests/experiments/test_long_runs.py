"""Long runs say what is wrong before, and whatever became of the run."""

import json

import pytest

from experiments.long_runs import endurance, kill


class Process:
    """A run that ends when it is asked how it is for the third time."""

    def __init__(self, *_, **__):
        self.stderr, self.pid, self.asked, self.returncode = [], 0, 0, None

    def poll(self):
        self.asked += 1
        self.returncode = 0 if self.asked > 2 else None
        return self.returncode


@pytest.fixture
def run(monkeypatch):
    """Two seconds of a run, at step 5 of 6."""
    monkeypatch.setattr(endurance.subprocess, "Popen", Process)
    monkeypatch.setattr(endurance, "setting", dict)
    monkeypatch.setattr(endurance.time, "sleep", lambda _: None)
    monkeypatch.setattr(endurance, "count_steps", lambda _: 5)
    monkeypatch.setattr(endurance, "read_log", lambda _: 6 * [{"data_wait": None}])
    monkeypatch.setattr(endurance, "_resident", lambda _: 100.0)


def test_a_short_run_has_a_result(run, tmp_path):
    out = tmp_path / "out.jsonl"
    assert endurance.main(steps=6, warmup=5, out=out) == 0
    found = json.loads(out.read_text())
    assert found["memory_mib"] == {"5": 100.0} and found["growth"] == 0
    assert found["data_wait"] is None


def test_a_run_that_is_never_seen_warm_is_an_error(run, monkeypatch, capsys):
    monkeypatch.setattr(endurance, "count_steps", lambda _: 1)
    assert endurance.main(steps=6, warmup=5) == 2
    assert "must be seen once after --warmup=5" in capsys.readouterr().err


def test_arguments_are_checked_first(capsys):
    assert endurance.main(steps=5, warmup=5) == 2
    assert "--warmup must be" in capsys.readouterr().err
    assert kill.main(kills=0) == 2
    assert "--kills and --steps must be at least 1" in capsys.readouterr().err


def test_a_run_without_an_end_has_no_loss():
    assert kill._heldout_loss({"trials.jsonl": []}) is None
