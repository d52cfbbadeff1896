"""Several processes by one command: what they are told, and how they end together."""

import signal
import subprocess
import sys
import textwrap

import pytest

from experiments import launch


def start(code, *, processes=2):
    flags = ["-m", "experiments.launch", f"--processes={processes}", "--"]
    return subprocess.Popen(
        [sys.executable, *flags, sys.executable, "-c", textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


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
            print("saved", flush=True)
            sys.exit(75)
        signal.signal(signal.SIGTERM, stop)
        print("ready", flush=True)
        time.sleep(600)
    """
    process = start(code)
    assert {process.stdout.readline() for _ in range(2)}
    process.send_signal(signal.SIGTERM)
    status, out, _ = finish(process)
    assert status == 75
    assert sorted(out.splitlines()) == ["[0] saved", "[1] saved"]


def test_a_signal_reaches_all_and_their_status_comes_back():
    code = """
        import signal, sys, time
        def stop(*_):
            print("stopped", flush=True)
            sys.exit(75)
        signal.signal(signal.SIGTERM, stop)
        print("ready", flush=True)
        time.sleep(600)
    """
    process = start(code)
    ready = {process.stdout.readline() for _ in range(2)}
    assert ready == {"[0] ready\n", "[1] ready\n"}
    process.send_signal(signal.SIGTERM)
    status, out, _ = finish(process)
    assert status == 75
    assert sorted(out.splitlines()) == ["[0] stopped", "[1] stopped"]


@pytest.mark.parametrize("argv", [["--processes=0", "--", "true"], ["--processes=2"]])
def test_nothing_to_run_is_one_sentence(argv, capsys):
    assert launch.main(argv) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: launch: --processes must be positive")
    assert error.count("\n") == 1


def test_a_command_that_is_missing_is_one_sentence(capsys):
    assert launch.main(["--", "no-such-command"]) == 2
    assert "no-such-command" in capsys.readouterr().err
