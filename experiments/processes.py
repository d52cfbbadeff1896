"""Several processes as one run, by JAX's distributed runtime."""

import os

import jax

_NUMBERS = ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID")


def initialize() -> None:
    """Joins the other processes of a run; before anything else of JAX.

    SLURM, Kubernetes and Open MPI are found by JAX itself. Elsewhere the environment
    says it: JAX_COORDINATOR_ADDRESS (host:port of process 0), JAX_NUM_PROCESSES and
    JAX_PROCESS_ID.

    Raises:
      ValueError: the environment does not say enough.
    """
    count, number = (os.environ.get(name) for name in _NUMBERS)
    try:
        jax.distributed.initialize(
            num_processes=None if count is None else int(count),
            process_id=None if number is None else int(number),
        )
    except (ValueError, RuntimeError) as error:
        raise ValueError(
            "--distributed: the environment must be that of SLURM, Kubernetes or Open "
            "MPI, or hold JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and "
            f"JAX_PROCESS_ID, got: {error}"
        ) from error
