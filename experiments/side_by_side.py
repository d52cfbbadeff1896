"""A function of many tasks, in several processes at a time."""

import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

R = TypeVar("R")


def side_by_side(
    function: Callable[..., R], tasks: Iterable[tuple], *, jobs: int
) -> Iterator[R]:
    """Yields the result of each task, in their order.

    Args:
      function: of a module.
      tasks: its arguments.
      jobs: processes that there are at a time, at least one.

    Raises:
      ChildProcessError: a process ended, or was ended, before it had a result.
    """
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(jobs, mp_context=spawn) as pool:
        try:
            yield from pool.map(function, *zip(*tasks, strict=True))
        except BrokenProcessPool:
            raise ChildProcessError(
                "a process ended before it had a result: see whether there is memory "
                f"for {jobs} of them, or take fewer --jobs."
            ) from None
