"""Over which mesh axes the type of an array spreads it, and which blocks that cuts."""

import contextlib
import math
from collections.abc import Generator, Mapping

import jax

# The mesh axes over which each axis of an array is spread.
Spread = tuple[tuple[str, ...], ...]


def spread_of(x: jax.Array) -> Spread:
    """Returns the mesh axes of every axis of an array that its type names."""
    spec = jax.typeof(x).sharding.spec
    names = [
        () if axis is None else axis if isinstance(axis, tuple) else (axis,)
        for axis in spec
    ]
    return (*names, *((),) * (x.ndim - len(names)))


def why_cut(x: jax.Array, runs: Mapping[int, int]) -> str | None:
    """Returns which axis the type of an array spreads in parts of runs, or None.

    Args:
      x: any array.
      runs: of how many elements the runs, or squares, along an axis are.
    """
    sizes, spread = dict(jax.typeof(x).sharding.mesh.shape), spread_of(x)
    for i, run in runs.items():
        shards = math.prod(sizes[name] for name in spread[i])
        if shards > 1 and x.shape[i] % (shards * run):
            return (
                f"axis {i} must be spread in whole runs of {run}, got "
                f"shape={x.shape} over {spread[i]} of {sizes}; reshard it, or spread "
                "another axis"
            )
    return None


@contextlib.contextmanager
def explaining(x: jax.Array, runs: Mapping[int, int]) -> Generator[None]:
    """Adds a note to an error whose cause may be how an array is spread."""
    try:
        yield
    except Exception as error:
        if (why := why_cut(x, runs)) is not None:
            error.add_note(f"quantize: {why}.")
        raise
