import dataclasses
import signal
import threading
import time
from types import SimpleNamespace

import pytest

from experiments.in_turn import ProcessDied
from experiments.many_runs import queue
from experiments.many_runs.queue import How, Task
from experiments.study import Results
from fp4jax.data import DataConfig
from tests.experiments.many_runs.cases import RUN, row


def test_runs_share_a_program_where_only_numbers_differ(tmp_path):
    how = How(data=DataConfig(), out=tmp_path / "r", deadline=0.0)
    seed, longer, other = (
        dataclasses.replace(RUN, **fields)
        for fields in ({"seed": 1}, {"tokens": 2 * RUN.tokens}, {"policy": "ufp4"})
    )
    found = [task.runs for task in queue.tasks([RUN, seed, other, longer], how)]
    assert found == [(RUN, seed, longer), (other,)]


def test_a_run_that_would_take_too_long_is_left_out(tmp_path, capsys, bytes_of_two):
    results = Results(tmp_path / "results.jsonl")
    results.add(row(dataclasses.replace(RUN, seed=9)))
    how = How(data=bytes_of_two, out=results.path, deadline=time.time() + 60)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(queue, "compiled", lambda *args, **kwargs: None)
        assert queue.prepare(Task((RUN,), how))() == 0
    assert "left out" in capsys.readouterr().out
    assert len(Results(results.path).rows) == 1


def test_several_gpus_take_tasks_from_one_queue(monkeypatch, tmp_path):
    how = How(data=DataConfig(), out=tmp_path / "r", deadline=0.0)
    tasks = [Task((dataclasses.replace(RUN, seed=seed),), how) for seed in range(5)]
    both, seen = threading.Barrier(2), {"0": [], "7": []}

    def in_turn(prepare, tasks, *, jobs, device):
        assert jobs == 2
        for i, task in enumerate(tasks):
            if i == 0:
                both.wait(20)  # for the other GPU to have a task, too
            seen[device].append(task.runs[0].seed)
            yield ProcessDied("it ended") if device == "7" else 1

    monkeypatch.setattr(queue, "in_turn", in_turn)
    monkeypatch.setattr(queue, "_gpus", lambda: ["0", "7"])
    died = queue.perform_all(tasks, jobs=3)
    assert sorted(seen["0"] + seen["7"]) == [0, 1, 2, 3, 4]
    assert died == len(seen["7"]) > 0


def test_an_interrupt_ends_what_several_gpus_do(monkeypatch, tmp_path):
    how = How(data=DataConfig(), out=tmp_path / "r", deadline=0.0)
    tasks = [Task((dataclasses.replace(RUN, seed=seed),), how) for seed in range(9)]
    both, ended, taken = threading.Barrier(2), threading.Event(), []
    child = SimpleNamespace(kill=ended.set)

    def in_turn(prepare, tasks, *, jobs, device):
        for task in tasks:
            taken.append(task)
            if both.wait(20) == 0:
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            assert ended.wait(20)  # as when the process that it waits for ends
            yield ProcessDied("it ended")

    monkeypatch.setattr(queue, "in_turn", in_turn)
    monkeypatch.setattr(queue, "_gpus", lambda: ["0", "1"])
    monkeypatch.setattr(queue.multiprocessing, "active_children", lambda: [child])
    # A shell starts what it runs in the background without this handler.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            queue.perform_all(tasks, jobs=2)
    finally:
        signal.signal(signal.SIGINT, before)
    assert len(taken) == 2


def test_gpus_are_those_that_this_process_sees(monkeypatch):
    assert queue._gpus() == []
    monkeypatch.setattr(queue.jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(queue.jax, "local_device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert queue._gpus() == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert queue._gpus() == ["4", "6"]
