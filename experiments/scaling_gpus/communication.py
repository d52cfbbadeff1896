"""How much of their time devices communicate, from a trace of JAX's profiler."""

import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax

Interval = tuple[float, float]

_DEVICE = "/device:GPU:"
_LINE = "Stream"  # what a device ran; other lines repeat it by module and operation
_KERNELS = ("nccl", "raggedalltoall", "multigpubarrier")  # the latter are XLA's own


class Communication(NamedTuple):
    """Parts of the time from the first to the last kernel, mean over devices.

    Attributes:
      share: in which a kernel that communicates runs.
      exposed: in which no other kernel runs beside it.
    """

    share: float
    exposed: float


def watch(run: Callable[[], object]) -> Communication | None:
    """Returns how devices communicate while `run` lasts; None of other than GPUs."""
    with tempfile.TemporaryDirectory() as folder:
        options = jax.profiler.ProfileOptions()
        options.python_tracer_level = 0
        with jax.profiler.trace(folder, profiler_options=options):
            run()
        (path,) = Path(folder).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_serialized_xspace(path.read_bytes())
    found = [
        of_kernels(
            (event.name, event.start_ns, event.start_ns + event.duration_ns)
            for line in plane.lines
            if line.name.startswith(_LINE)
            for event in line.events
        )
        for plane in data.planes
        if plane.name.startswith(_DEVICE)
    ]
    known = [each for each in found if each is not None]
    if not known:
        return None
    shares, exposed = zip(*known, strict=True)
    return Communication(sum(shares) / len(known), sum(exposed) / len(known))


def of_kernels(kernels: Iterable[tuple[str, float, float]]) -> Communication | None:
    """Returns how one device communicates; None if it did nothing.

    Args:
      kernels: name, start and end of each.
    """
    every, sends, others = [], [], []
    for name, start, end in kernels:
        every.append((start, end))
        is_send = any(kernel in name.lower() for kernel in _KERNELS)
        (sends if is_send else others).append((start, end))
    if not every:
        return None
    whole = max(end for _, end in every) - min(start for start, _ in every)
    both = _covered([*sends, *others])
    return Communication(_covered(sends) / whole, (both - _covered(others)) / whole)


def _covered(intervals: Sequence[Interval]) -> float:
    """Returns the length of the union of intervals."""
    total, last = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, last))
        last = max(last, end)
    return total
