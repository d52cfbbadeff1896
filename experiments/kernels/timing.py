"""How long a compiled function takes on a device, once it is warm."""

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

_BLOCKS = 5
_BLOCK_SECONDS = 0.02


def seconds(function: Callable, inputs: Sequence[Any]) -> float:
    """Returns the time of a call: of several blocks of calls, the fastest's mean."""
    return measurements(function, inputs, count=1)[0]


def measurements(
    function: Callable,
    inputs: Sequence[Any],
    *,
    count: int,
    options: dict[str, Any] | None = None,
) -> list[float]:
    """Returns `seconds` of a function that is compiled once, measured several times.

    Args:
      function: of one tree of arrays; it is compiled here.
      inputs: taken in turns: together more than a cache holds.
      count: of measurements.
      options: of the compiler.
    """
    compiled = jax.jit(function, compiler_options=options).lower(inputs[0]).compile()
    return of_compiled(compiled, inputs, count=count)


def of_compiled(
    compiled: jax.stages.Compiled, inputs: Sequence[Any], *, count: int
) -> list[float]:
    """Returns `measurements` of a compiled function.

    Calls are not waited for within a block, so that nothing of the host is measured.
    """
    for x in inputs:
        jax.block_until_ready(compiled(x))
    start = time.perf_counter()
    jax.block_until_ready(compiled(inputs[0]))
    calls = max(1, round(_BLOCK_SECONDS / (time.perf_counter() - start)))

    def block() -> float:
        result, start = None, time.perf_counter()
        for x in itertools.islice(itertools.cycle(inputs), calls):
            result = compiled(x)
        jax.block_until_ready(result)
        return (time.perf_counter() - start) / calls

    return [min(block() for _ in range(_BLOCKS)) for _ in range(count)]


def copy_seconds(num_bytes: int) -> float:
    """Returns the time of the fastest copy that reads and writes so many bytes."""
    half = max(num_bytes // 4, 1)  # two bytes an element, read and written
    inputs = [jnp.full(half, value, jnp.bfloat16) for value in (1.5, 2.5)]
    copies = (lambda x: x * 2, lambda x: jnp.concatenate([x[1:], x[:1]]), jnp.copy)
    return min(seconds(copy, inputs) for copy in copies)
