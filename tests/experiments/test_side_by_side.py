"""Tasks in several processes, of which one may die."""

import importlib
import os
import signal

import pytest

from experiments.side_by_side import side_by_side


def die(number, _):
    if number == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return number


def test_results_are_in_the_order_of_tasks():
    assert list(side_by_side(divmod, [(7, 2), (9, 5)], jobs=2)) == [(3, 1), (1, 4)]


def test_a_process_that_is_killed_is_not_waited_for():
    with pytest.raises(ChildProcessError, match="for 1 of them, or take fewer --jobs"):
        list(side_by_side(die, [(0, 0), (1, 0)], jobs=1))


studies = pytest.mark.parametrize("name", ["families", "user_models"])


@studies
def test_no_jobs_is_one_sentence(name, capsys):
    study = importlib.import_module(f"experiments.{name}.run")
    with pytest.raises(SystemExit):
        study.main(["--jobs=0"])
    assert "--jobs must be positive, got 0" in capsys.readouterr().err


@studies
def test_a_study_that_lost_a_process_says_so(name, tmp_path, monkeypatch, capsys):
    def lost(function, tasks, *, jobs):
        raise ChildProcessError("a process ended")
        yield

    study = importlib.import_module(f"experiments.{name}.run")
    monkeypatch.setattr(study, "side_by_side", lost)
    assert study.main([f"--out={tmp_path / 'results'}"]) == 1
    assert capsys.readouterr().err == "error: a process ended\n"
