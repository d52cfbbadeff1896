"""What this process and its children find before they ask for devices."""

import os

import jax

from experiments.in_turn import share_memory

VIRTUAL = 8


def prepare(*, dry: bool) -> None:
    """Prepares the environment.

    Args:
      dry: makes virtual devices of the CPU.
    """
    # A program that uses multicast can put the GPUs of a shared host out of service.
    os.environ["NCCL_NVLS_ENABLE"] = "0"
    share_memory()
    if dry:
        os.environ |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(VIRTUAL)}
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", VIRTUAL)
