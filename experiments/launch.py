"""Runs a command as several processes of this machine, which JAX makes one run.

python -m experiments.launch -- python -m experiments.pretrain --distributed
"""

import contextlib
import dataclasses
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Generator, Sequence
from typing import IO

import tyro

_GRACE = 30.0  # seconds from the first failure until the others are killed
_SAVING = 300.0  # seconds from the first that a signal has ended until that
_POLL = 0.05


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Runs a command as several processes of this machine, which JAX makes one run.

    - Every process gets JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID,
      and JAX_LOCAL_DEVICE_IDS: of several GPUs, the one of its number.
    - A line of output begins with the number of its process.
    - SIGTERM, SIGINT and SIGHUP go to all of them.
    - Where one fails, the others are ended, and the exit status is that of the first.
    """

    processes: int = 2
    """how many."""
    command: tyro.conf.Positional[tuple[str, ...]]
    """what each of them runs, after two dashes."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    try:
        arguments = tyro.cli(Arguments, prog="python -m experiments.launch", args=argv)
        return launch(arguments.command, processes=arguments.processes)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def launch(command: Sequence[str], *, processes: int) -> int:
    """Runs a command in processes that find each other; returns the exit status.

    Raises:
      ValueError: no command, or no processes.
      OSError: the command cannot be started.
    """
    if processes < 1 or not command:
        raise ValueError(
            "launch: --processes must be positive and -- followed by a command, got "
            f"--processes={processes} and {list(command)}."
        )
    address, children, pumps = f"localhost:{_free_port()}", [], []
    try:
        with _signals_passed_to(children) as received:
            for number in range(processes):
                found_by = {
                    "JAX_COORDINATOR_ADDRESS": address,
                    "JAX_NUM_PROCESSES": str(processes),
                    "JAX_PROCESS_ID": str(number),
                    "JAX_LOCAL_DEVICE_IDS": str(number),
                }
                child = subprocess.Popen(
                    command,
                    env=os.environ | found_by,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    start_new_session=True,  # or the terminal sends Ctrl-C as well
                )
                children.append(child)
                for signal_before in received:
                    _send(signal_before, [child])
                pumps += _pumps(child, prefix=f"[{number}] ".encode())
            try:
                return _first_failure(children, received)
            finally:
                _end(children)
    finally:
        _send(signal.SIGKILL, children)  # also what those have left that ended
        for pump in pumps:
            pump.join()


def _first_failure(
    children: Sequence[subprocess.Popen], received: Sequence[int]
) -> int:
    """Waits until all have ended or one has failed; returns its status, or 0.

    After a signal, which asks all of them to stop, they have time to save.
    """
    deadline = None
    while True:
        statuses = [child.poll() for child in children]
        failed = [n if n > 0 else 128 - n for n in statuses if n]
        if None not in statuses:
            return failed[0] if failed else 0
        if failed and deadline is None:
            deadline = time.monotonic() + (_SAVING if received else 0)
        if deadline is not None and time.monotonic() >= deadline:
            return failed[0]
        time.sleep(_POLL)


def _end(children: Sequence[subprocess.Popen]) -> None:
    """Asks all that still run to end, and waits for it as long as is due."""
    _send(signal.SIGTERM, children)
    deadline = time.monotonic() + _GRACE
    for child in children:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(max(0.0, deadline - time.monotonic()))


def _send(number: int, children: Sequence[subprocess.Popen]) -> None:
    """Sends a signal to all processes and to what they have started."""
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number)


@contextlib.contextmanager
def _signals_passed_to(children: Sequence[subprocess.Popen]) -> Generator[list[int]]:
    """Hands on signals that ask to end, which then do not end this process."""
    numbers, received = [signal.SIGTERM, signal.SIGINT], []
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as nohup has it
        numbers.append(signal.SIGHUP)

    def hand_on(number: int, _) -> None:
        received.append(number)
        _send(number, children)

    before = [signal.signal(number, hand_on) for number in numbers]
    try:
        yield received
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


def _pumps(child: subprocess.Popen, *, prefix: bytes) -> list[threading.Thread]:
    """Copies the output of a process line by line, until it ends or nobody reads."""

    def copy(source: IO[bytes], sink: IO[bytes]) -> None:
        with source, contextlib.suppress(BrokenPipeError):
            for line in source:
                sink.write(prefix + line)  # one call, so that lines stay whole
                sink.flush()

    pipes = ((child.stdout, sys.stdout.buffer), (child.stderr, sys.stderr.buffer))
    pumps = [threading.Thread(target=copy, args=pipe, daemon=True) for pipe in pipes]
    for pump in pumps:
        pump.start()
    return pumps


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return free.getsockname()[1]


if __name__ == "__main__":
    sys.exit(main())
