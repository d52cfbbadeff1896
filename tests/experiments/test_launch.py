"""Several processes by one command: what they are told, and how they end together."""

import fcntl
import signal
import subprocess
import sys
import textwrap
import threading
import time

import pytest

from experiments import launch


def start(code, *flags, processes=2):
    flags = ["-m", "experiments.launch", f"--processes={processes}", *flags, "--"]
    return subprocess.Popen(
        [sys.executable, *flags, sys.executable, "-c", textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def wait_until_ready(process):
    lines = {process.stdout.readline() for _ in range(2)}
    assert lines == {"[0] ready\n", "[1] ready\n"}


def finish(process):
    out, error = process.communicate(timeout=60)
    return process.returncode, out, error


def test_every_process_knows_the_others_and_signs_its_lines():
    code = """
        import os, sys
        print(os.environ["JAX_PROCESS_ID"], os.environ["JAX_NUM_PROCESSES"])
        print(os.environ["JAX_COORDINATOR_ADDRESS"], file=sys.stderr)
    """
    status, out, error = finish(start(code, processes=3))
    assert status == 0
    assert sorted(out.splitlines()) == ["[0] 0 3", "[1] 1 3", "[2] 2 3"]
    addresses = {line.partition(" ")[2] for line in error.splitlines()}
    assert len(addresses) == 1 and addresses.pop().startswith("localhost:")


def test_one_that_fails_ends_the_others():
    code = """
        import os, sys, time
        if os.environ["JAX_PROCESS_ID"] == "1":
            sys.exit(7)
        time.sleep(600)
    """
    assert finish(start(code))[0] == 7


def test_what_a_failed_process_has_started_ends_too():
    code = """
        import subprocess, sys
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        sys.exit(7)
    """
    assert finish(start(code, processes=1))[0] == 7


def test_after_a_signal_the_others_may_save():
    code = """
        import os, signal, sys, time
        def stop(*_):
            time.sleep(1.0 * int(os.environ["JAX_PROCESS_ID"]))
            os.write(1, b"saved\\n")  # print may have been interrupted
            sys.exit(75)
        signal.signal(signal.SIGTERM, stop)
        print("ready", flush=True)
        time.sleep(600)
    """
    process = start(code)
    wait_until_ready(process)
    process.send_signal(signal.SIGTERM)
    status, out, _ = finish(process)
    assert status == 75
    assert sorted(out.splitlines()) == ["[0] saved", "[1] saved"]


def test_a_signal_reaches_all_and_their_status_comes_back():
    code = """
        import os, signal, sys, time
        def stop(*_):
            os.write(1, b"stopped\\n")
            sys.exit(75)
        signal.signal(signal.SIGTERM, stop)
        print("ready", flush=True)
        time.sleep(600)
    """
    process = start(code)
    wait_until_ready(process)
    process.send_signal(signal.SIGTERM)
    status, out, _ = finish(process)
    assert status == 75
    assert sorted(out.splitlines()) == ["[0] stopped", "[1] stopped"]


DEAF = """
    import signal, time
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print("ready", flush=True)
    time.sleep(600)
"""


def test_another_signal_kills_what_hangs_and_the_same_twice_at_once_does_not():
    process = start(DEAF)
    wait_until_ready(process)
    for _ in range(2):
        process.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(2 * launch._AGAIN)  # of which it may need some to hear the first
    process.send_signal(signal.SIGTERM)
    assert finish(process)[0] == 128 + signal.SIGKILL


def test_what_hangs_has_no_more_than_its_time_after_a_signal(monkeypatch):
    monkeypatch.setattr(launch, "_GRACE", 0.1)
    in_a_second = threading.Timer(1, signal.raise_signal, (signal.SIGTERM,))
    in_a_second.start()
    deaf = [sys.executable, "-c", textwrap.dedent(DEAF)]
    status = launch.launch(deaf, processes=1, saving=0.1)
    assert status == 128 + signal.SIGTERM


def test_a_closed_terminal_ends_all():
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # under nohup it is ignored
    process = start("import time; print('ready', flush=True); time.sleep(600)")
    signal.signal(signal.SIGHUP, before)
    wait_until_ready(process)
    process.send_signal(signal.SIGHUP)
    assert finish(process)[0] == 128 + signal.SIGHUP


def test_none_outlives_a_launcher_that_is_killed(tmp_path):
    code = f"""
        import fcntl, os, signal, time
        for number in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        file = open({str(tmp_path)!r} + "/" + os.environ["JAX_PROCESS_ID"], "w")
        fcntl.flock(file, fcntl.LOCK_EX)
        print("ready", flush=True)
        time.sleep(60)
    """
    process = start(code)
    wait_until_ready(process)
    process.kill()
    finish(process)
    began = time.monotonic()
    for number in range(2):
        with open(tmp_path / str(number)) as file:
            fcntl.flock(file, fcntl.LOCK_EX)  # which a process has until it ends
    assert time.monotonic() - began < 30


def test_a_signal_reaches_those_that_start_after_it(monkeypatch):
    class Started(subprocess.Popen):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            if kwargs.get("env", {}).get("JAX_PROCESS_ID") == "0":
                signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(launch.subprocess, "Popen", Started)
    assert launch.launch(["sleep", "9"], processes=2) == 128 + signal.SIGTERM


def test_what_nobody_reads_is_not_waited_for():
    process = start("while True: print('more')", processes=1)
    process.stdout.readline()
    process.stdout.close()
    assert process.wait(20)
    process.stderr.close()


@pytest.mark.parametrize("argv", [["--processes=0", "--", "true"], ["--processes=2"]])
def test_nothing_to_run_is_one_sentence(argv, capsys):
    assert launch.main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: launch: --processes must be positive")
    assert error.count("\n") == 1


def test_a_command_that_is_missing_is_one_sentence(capsys):
    assert launch.main(["--", "no-such-command"]) == 2
    assert "no-such-command" in capsys.readouterr().err
