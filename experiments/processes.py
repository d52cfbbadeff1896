"""Several processes as one run, by JAX's distributed runtime."""

import os
import sys
import threading

import jax

_TRY_AGAIN = 75  # the exit status by which a scheduler knows that it may help
_ADDRESS = "JAX_COORDINATOR_ADDRESS"
_NUMBERS = ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
# Beyond our own limit: where JAX's is over it aborts the process with a stack trace.
_GRACE = 3600


def initialize(*, timeout: int) -> None:
    """Joins the other processes of a run; before anything else of JAX.

    SLURM and Open MPI are found by JAX itself. Elsewhere the environment says it:
    JAX_COORDINATOR_ADDRESS (host:port of process 0), JAX_NUM_PROCESSES and
    JAX_PROCESS_ID.

    Args:
      timeout: seconds within which all have to come; otherwise this process ends with
        an error and status 75.

    Raises:
      ValueError: the environment does not say enough, or an address without a port; a
        timeout below 1.
    """
    if timeout < 1:
        raise ValueError(
            f"--wait: must be a positive number of seconds, got {timeout}."
        )
    address = os.environ.get(_ADDRESS)
    if address is not None and not address.rpartition(":")[2].isdecimal():
        raise ValueError(f"--distributed: {_ADDRESS} must be host:port, got {address}.")
    count, number = (os.environ.get(name) for name in _NUMBERS)
    limit = threading.Timer(timeout, _give_up, (timeout, count, number))
    limit.start()
    try:
        jax.distributed.initialize(
            num_processes=None if count is None else int(count),
            process_id=None if number is None else int(number),
            initialization_timeout=timeout + _GRACE,
        )
    except (ValueError, RuntimeError) as error:
        raise ValueError(
            "--distributed: the environment must be that of SLURM, Kubernetes or Open "
            "MPI, or hold JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and "
            f"JAX_PROCESS_ID, got: {error}"
        ) from error
    finally:
        limit.cancel()


def check_alone() -> None:
    """Raises ValueError if the environment makes this process one of several."""
    if (count := os.environ.get(_NUMBERS[0], "1")) != "1":
        raise ValueError(
            f"--distributed: must be given to one of several processes, got "
            f"{_NUMBERS[0]}={count} without it. Give it, or unset {_NUMBERS[0]}."
        )


def leave(status: int) -> int:
    """Returns the exit status of a failure that other processes may not have.

    Of several processes, this one ends here: at its usual end JAX would have it wait
    for the others, which wait for it in a collective.
    """
    if jax.distributed.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)
    return status


def _give_up(timeout: int, count: str | None, number: str | None) -> None:
    """Ends the process, whose main thread is inside a call that does not return."""
    print(
        f"error: --distributed: all {count or ''} processes must come within "
        f"{timeout} s, but process {number or os.environ.get('SLURM_PROCID', '?')} "
        "waits for another one. See whether each was started and can reach "
        f"{os.environ.get(_ADDRESS, 'the first')}.",
        file=sys.stderr,
        flush=True,
    )
    os._exit(_TRY_AGAIN)
