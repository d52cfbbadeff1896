"""What the processes of one run agree on, before any of them waits for their devices.

A collective gives up after half a minute, or never, if a process does not take part.
JAX's coordination service, by which these functions work, waits while all are alive.
"""

import contextlib
import itertools
import json
from collections.abc import Callable, Generator, Sequence
from typing import Any

import jax
from orbax.checkpoint import multihost

from fp4jax.train.checkpoint import config_differences

WRONG = (ValueError, TypeError, OSError, ImportError)  # of arguments, files, packages

_LOOK_MS = 1000  # between two of which Python sees signals
_rounds = itertools.count()


def is_first() -> bool:
    """Returns whether this is process 0, which speaks for all of a run."""
    return not jax.distributed.is_initialized() or jax.process_index() == 0


def of_first(text: str) -> str:
    """Returns the text of process 0, in all processes, which ask together."""
    return _decide(text, lambda texts: texts[0])


@contextlib.contextmanager
def agreed() -> Generator[None]:
    """Ends a block in all processes if it fails in one, and has all wait for its end.

    Raises:
      ValueError: what of `WRONG` the block of another process has raised.
      RuntimeError: anything else that it has raised.
      Exception: what this block has raised.
    """
    failure = None
    try:
        yield
    except Exception as error:
        failure = error
    kind = None if failure is None else "wrong" if isinstance(failure, WRONG) else "bug"
    found = _decide(json.dumps([kind, str(failure)]), _first_failure)
    if failure is not None:
        raise failure
    if found:
        kind, message = json.loads(found)
        raise (ValueError if kind == "wrong" else RuntimeError)(message)


def check_same(value: Any) -> None:
    """Raises a ValueError in all processes if they differ in a value, as JSON has it.

    It names the first process that differs from process 0, and in what.
    """
    mine = json.dumps(value)
    with agreed():
        first = json.loads(of_first(mine))
        if differences := config_differences(first, json.loads(mine)):
            raise ValueError(
                "--distributed: all processes must run the same on the same data, but "
                f"process 0 has {'; '.join(differences)}. Give all of them the same "
                "arguments, files and working folder."
            )


def _first_failure(texts: Sequence[str]) -> str:
    """Returns the first failure, with the process it is from; "" if there is none."""
    for process, text in enumerate(texts):
        kind, message = json.loads(text)
        if kind is not None:
            of = f"process {process}: " if process else ""
            return json.dumps([kind, f"{of}{message}"])
    return ""


def _decide(mine: str, choose: Callable[[Sequence[str]], str]) -> str:
    """Returns what process 0 chooses of the texts of all processes, in all of them."""
    if not jax.distributed.is_initialized():
        return choose([mine])
    client, name = multihost.get_jax_distributed_client(), f"agreed/{next(_rounds)}"
    client.key_value_set(f"{name}/{jax.process_index()}", mine)
    if jax.process_index() == 0:
        texts = [_wait_for(client, f"{name}/{i}") for i in range(jax.process_count())]
        client.key_value_set(name, choose(texts))
    return _wait_for(client, name)


def _wait_for(client: Any, name: str) -> str:
    """Returns a text of the coordination service, as soon as it is there."""
    while True:
        try:
            return client.blocking_key_value_get(name, _LOOK_MS)
        except jax.errors.JaxRuntimeError as error:
            if not str(error).startswith("DEADLINE_EXCEEDED"):
                raise
