"""Tasks that are prepared several at a time, and finished one after another.

Preparing is Python's work, such as the tracing of a program, of which a process does
one at a time. What follows has the device for itself; its memory is free again when the
process ends.
"""

import itertools
import multiprocessing
import os
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")

_END_SECONDS = 20.0  # in which a process that has nothing more to do must end


def share_memory() -> None:
    """Lets each process that starts take memory of a GPU as it needs it.

    Without, the first takes three fourths, and none can have more. What the environment
    says stays.
    """
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    os.environ.setdefault("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.95")


class ProcessDied(Exception):
    """A process ended, or was ended, before it had a result, or the only one raised."""


def in_turn(
    prepare: Callable[[T], Callable[[], R]],
    tasks: Iterable[T],
    *,
    jobs: int,
    limit: float | None = None,
    device: str | None = None,
) -> Iterator[R | ProcessDied]:
    """Yields the result of each task, in their order.

    Args:
      prepare: returns what finishes a task. A function of a module, where there are
        several jobs.
      tasks: its arguments.
      jobs: processes that there are at a time; 1: this one does everything.
      limit: seconds that a process may take once the others wait for it, or it is
        killed; None: as long as it takes. One whose result is there and that does not
        end is killed in any case, and its result counts. One job has no limit.
      device: the only GPU that processes see; None: all. With one, there always are
        processes.

    Raises:
      ValueError: `jobs` is not positive.
    """
    if jobs < 1:
        raise ValueError(f"in_turn: jobs must be positive, got jobs={jobs}.")
    if jobs == 1 and device is None:
        for task in tasks:
            yield _here(prepare, task)
        return
    waiting, running = iter(tasks), deque[tuple[SpawnProcess, Connection]]()
    try:
        while True:
            for task in itertools.islice(waiting, jobs - len(running)):
                running.append(_start(prepare, task, device))
            if not running:
                return
            yield _finish(*running[0], limit)
            running.popleft()
    finally:
        for process, _ in running:
            process.kill()


def _here(prepare: Callable[[T], Callable[[], R]], task: T) -> R | ProcessDied:
    """Returns the result of a task; an error is printed, as another process does."""
    try:
        return prepare(task)()
    except Exception as error:
        traceback.print_exc()
        first_line = str(error).partition("\n")[0]
        return ProcessDied(f"{type(error).__name__}: {first_line}")


def _start(
    prepare: Callable[[T], Callable[[], R]], task: T, device: str | None
) -> tuple[SpawnProcess, Connection]:
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(theirs, prepare, task, device))
    process.start()
    theirs.close()
    return process, ours


def _work(
    connection: Connection,
    prepare: Callable[[T], Callable[[], R]],
    task: T,
    device: str | None,
) -> None:
    if device is not None:  # before JAX looks for devices
        os.environ["CUDA_VISIBLE_DEVICES"] = device
    threading.Thread(target=_end_with_parent, daemon=True).start()
    finish = prepare(task)
    connection.recv()  # its turn
    connection.send(finish())


def _end_with_parent() -> None:
    """Ends this process when that which started it ends, by a signal for instance."""
    if (parent := multiprocessing.parent_process()) is not None:
        parent.join()
        os._exit(1)


def _finish(
    process: SpawnProcess, connection: Connection, limit: float | None
) -> Any | ProcessDied:
    """Returns the result of a process, which then is no more."""
    try:
        connection.send(None)
        if not connection.poll(limit):
            process.kill()
            process.join()
            return ProcessDied(f"it took longer than {limit:g} seconds")
        result = connection.recv()
    except (EOFError, OSError):
        return ProcessDied(f"the process ended with status {_end(process)}")
    _end(process)
    return result


def _end(process: SpawnProcess) -> int | None:
    """Waits until a process ends, or ends it; returns its status."""
    process.join(_END_SECONDS)
    if process.is_alive():  # libraries of devices can hang at their end
        process.kill()
        process.join()
    return process.exitcode
