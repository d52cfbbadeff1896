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
_KILLED = 5.0  # seconds that the kernel has to end those that are killed
_AGAIN = 1.0  # seconds until a signal is another one: `timeout` sends its own twice
_POLL = 0.05

# Kills process groups, whose numbers it reads, once nobody is left to write more.
_GUARD = """
import contextlib, os, signal, sys
for group in [int(line) for line in sys.stdin]:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(group, signal.SIGKILL)
"""

Received = tuple[int, float]  # a signal, and when it came, in seconds


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arguments:
    """Runs a command as several processes of this machine, which JAX makes one run.

    - Every process gets JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES, JAX_PROCESS_ID,
      and JAX_LOCAL_DEVICE_IDS: of several GPUs, the one of its number.
    - A line of output begins with the number of its process.
    - SIGTERM, SIGINT and SIGHUP go to all of them; another one, a second later or
      more, kills them.
    - Where one fails, the others are ended, and the exit status is that of the first.
    - Where this command itself is killed, so are they.
    """

    processes: int = 2
    """how many."""
    saving: float = 300.0
    """seconds from a signal until those that have not ended are made to."""
    command: tyro.conf.Positional[tuple[str, ...]]
    """what each of them runs, after two dashes."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command and returns its exit status."""
    try:
        arguments = tyro.cli(Arguments, prog="python -m experiments.launch", args=argv)
        return launch(
            arguments.command, processes=arguments.processes, saving=arguments.saving
        )
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def launch(command: Sequence[str], *, processes: int, saving: float = 300.0) -> int:
    """Runs a command in processes that find each other; returns the exit status.

    Args:
      command: what each of them runs.
      processes: how many.
      saving: seconds that they have after a signal.

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
        with _guard() as guarded, _signals_passed_to(children) as received:
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
                guarded.write(b"%d\n" % child.pid)
                for signal_before, _ in received:
                    _send(signal_before, [child])
                pumps += _pumps(child, prefix=f"[{number}] ".encode())
            try:
                return _first_failure(children, received, saving=saving)
            finally:
                _send(signal.SIGTERM, children)
                _wait(children, seconds=_GRACE)
    finally:
        _send(signal.SIGKILL, children)  # also what those have left that ended
        _wait(children, seconds=_KILLED)
        for pump in pumps:
            pump.join()


def _first_failure(
    children: Sequence[subprocess.Popen], received: Sequence[Received], *, saving: float
) -> int:
    """Waits until all have ended or one has failed; returns its status, or 0.

    After a signal, which asks all of them to stop, they have time to save; but one that
    waits in vain for another, inside of a call of its device, never sees the signal.
    """
    while True:
        statuses = [child.poll() for child in children]
        failed = [n if n > 0 else 128 - n for n in statuses if n]
        if None not in statuses:
            return failed[0] if failed else 0
        if failed and not received:
            return failed[0]
        if received and time.monotonic() >= received[0][1] + saving:
            return failed[0] if failed else 128 + received[0][0]
        time.sleep(_POLL)


def _wait(children: Sequence[subprocess.Popen], *, seconds: float) -> None:
    """Waits until all processes have ended, or so long."""
    deadline = time.monotonic() + seconds
    for child in children:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(max(0.0, deadline - time.monotonic()))


@contextlib.contextmanager
def _guard() -> Generator[IO[bytes]]:
    """Takes numbers of groups, which do not outlive this process even on SIGKILL."""
    pipe = {"stdin": subprocess.PIPE, "bufsize": 0, "start_new_session": True}
    with subprocess.Popen([sys.executable, "-IS", "-c", _GUARD], **pipe) as guard:
        assert guard.stdin is not None
        try:
            yield guard.stdin
        finally:
            guard.kill()


def _send(number: int, children: Sequence[subprocess.Popen]) -> None:
    """Sends a signal to all processes and to what they have started."""
    for child in children:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, number)


@contextlib.contextmanager
def _signals_passed_to(
    children: Sequence[subprocess.Popen],
) -> Generator[list[Received]]:
    """Hands on signals that ask to end, which then do not end this process."""
    numbers, received = [signal.SIGTERM, signal.SIGINT], []
    if signal.getsignal(signal.SIGHUP) != signal.SIG_IGN:  # as nohup has it
        numbers.append(signal.SIGHUP)

    def hand_on(number: int, _) -> None:
        received.append((number, time.monotonic()))
        is_another = received[-1][1] >= received[0][1] + _AGAIN
        _send(signal.SIGKILL if is_another else number, children)

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
