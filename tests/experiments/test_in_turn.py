"""Tasks that processes prepare together and finish alone."""

import multiprocessing
import os
import threading
import time

import pytest

from experiments.in_turn import ProcessDied, in_turn


def squared(task):
    number, _ = task
    return lambda: number**2


def stamped(task):
    """Prepares at once; the first waits for another to be prepared before it ends."""
    number, folder = task
    (folder / f"prepared{number}").touch()

    def finish():
        begin = time.monotonic()
        while number == 0 and not (folder / "prepared1").exists():
            assert time.monotonic() - begin < 20
            time.sleep(0.01)
        assert not list(folder.glob("running*"))
        (folder / f"running{number}").touch()
        time.sleep(0.05)
        (folder / f"running{number}").unlink()
        return os.getpid()

    return finish


def dies(task):
    if task == 1:
        os._exit(3)
    return lambda: task


def test_one_process_does_all_in_order(tmp_path):
    tasks = [(i, tmp_path) for i in range(3)]
    assert list(in_turn(squared, tasks, jobs=1)) == [0, 1, 4]


def test_several_prepare_while_one_finishes(tmp_path):
    tasks = [(i, tmp_path) for i in range(3)]
    found = list(in_turn(stamped, tasks, jobs=2))
    assert len({*found, os.getpid()}) == 4


def test_a_process_that_dies_leaves_the_others_their_turn():
    first, second, third = in_turn(dies, [0, 1, 2], jobs=3)
    assert (first, third) == (0, 2)
    assert isinstance(second, ProcessDied) and "status 3" in str(second)


def fails(task):
    return lambda: 1 // task


def test_an_error_of_the_only_process_leaves_the_others_their_turn(capfd):
    first, second = in_turn(fails, [0, 1], jobs=1)
    assert isinstance(first, ProcessDied) and second == 1
    assert str(first).startswith("ZeroDivisionError: ")
    assert "Traceback" in capfd.readouterr().err


def sleeps(task):
    return lambda: time.sleep(task) or task


def test_a_process_that_takes_too_long_is_ended():
    first, second = in_turn(sleeps, [60, 0], jobs=2, limit=2)
    assert isinstance(first, ProcessDied) and "longer than 2 seconds" in str(first)
    assert second == 0


def never_ends(task):
    def finish():
        threading.Thread(target=time.sleep, args=(60,)).start()
        return task

    return finish


def test_a_process_that_hangs_at_its_end_is_ended(monkeypatch):
    monkeypatch.setattr("experiments.in_turn._END_SECONDS", 0.1)
    start = time.monotonic()
    assert list(in_turn(never_ends, [1, 2], jobs=2)) == [1, 2]
    assert time.monotonic() - start < 50


def outlives(folder):
    def finish():
        (folder / "began").touch()
        time.sleep(1)
        (folder / "ended").touch()

    return finish


def consume(folder):
    list(in_turn(outlives, [folder], jobs=2))


def test_no_process_outlives_the_command(tmp_path):
    command = multiprocessing.get_context("spawn").Process(
        target=consume, args=(tmp_path,)
    )
    command.start()
    while not (tmp_path / "began").exists():
        assert command.is_alive()
        time.sleep(0.01)
    command.terminate()
    command.join()
    time.sleep(1.2)
    assert not (tmp_path / "ended").exists()


def test_there_must_be_a_job():
    with pytest.raises(ValueError, match="jobs must be positive, got jobs=0"):
        next(in_turn(squared, [], jobs=0))


def named_device(task):
    device = os.environ.get("CUDA_VISIBLE_DEVICES")
    return lambda: (task, device, os.getpid())


def test_processes_see_the_device_that_is_named():
    ((task, device, process),) = in_turn(named_device, [7], jobs=1, device="3")
    assert (task, device) == (7, "3") and process != os.getpid()
