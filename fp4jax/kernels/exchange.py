"""Who sends tiles to the devices that need them, along an axis of a mesh.

What a device sends, [parts n, ...], has room of n tiles for each device, of which the
first are needed; so has what it receives, for each sender:

    y[s n : s n + received_s] = what device s sends here
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fp4jax.kernels.choice import chosen

# How many devices XLA's kernel serves, and into how many pieces what each of them sends
# should be divided: a piece is copied by a block of threads.
_PEERS = 8
_PIECES = 512


def exchange(
    x: jax.Array, *, sent: jax.Array, received: jax.Array, axis: str
) -> jax.Array:
    """Returns what all devices send to each, inside of `jax.shard_map`.

    Beyond `received` are zeros, or what the senders have there; so is the gradient
    beyond `sent`.

    Args:
      x: [parts n, ...].
      sent: int32 [parts], how many of each n are needed, at most n.
      received: int32 [parts], how many each device sends here.
      axis: of the mesh, of `parts` devices.
    """
    if lax.axis_size(axis) == 1:
        return x
    how = chosen().exchange
    return _exchange(_default(axis) if how is None else how, axis, x, sent, received)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _exchange(how, axis, x, sent, received):
    return how.exchange(x, sent, received, axis=axis)


def _exchange_fwd(how, axis, x, sent, received):
    return _exchange(how, axis, x, sent, received), (sent, received)


def _exchange_bwd(how, axis, sizes, dy):
    sent, received = sizes
    return _exchange(how, axis, dy, received, sent), None, None


_exchange.defvjp(_exchange_fwd, _exchange_bwd)


@dataclasses.dataclass(frozen=True)
class Dense:
    """Sends all of the room, needed or not."""

    def exchange(
        self, x: jax.Array, sent: jax.Array, received: jax.Array, *, axis: str
    ) -> jax.Array:
        """Computes `exchange`."""
        del sent, received
        return lax.all_to_all(x, axis, 0, 0, tiled=True)


@dataclasses.dataclass(frozen=True)
class Ragged:
    """Sends what is needed, by a collective that XLA has for GPUs and TPUs.

    Attributes:
      pieces: into which the tiles for each device are divided; None: so many that
        GPUs of one process copy them fast, and one elsewhere.
    """

    pieces: int | None = None

    def __post_init__(self):
        if self.pieces is not None and self.pieces < 1:
            raise ValueError(
                "Ragged: pieces must be a positive number or None, "
                f"got pieces={self.pieces}."
            )

    def exchange(
        self, x: jax.Array, sent: jax.Array, received: jax.Array, *, axis: str
    ) -> jax.Array:
        """Computes `exchange`, with zeros beyond what is received."""
        parts = lax.axis_size(axis)
        pieces = _pieces(axis) if self.pieces is None else self.pieces
        room = x.shape[0] // parts
        starts, send_sizes = _divided(sent, pieces)
        first = room * jnp.arange(parts, dtype=jnp.int32)[:, None]
        # Zeros that differ, as far as XLA knows, in every turn of a loop: constants
        # it would fill before the loop, and copy in every turn.
        zero = jnp.minimum(received[0], 0).astype(x.dtype)
        return lax.ragged_all_to_all(
            x,
            jnp.broadcast_to(zero, x.shape),
            (first + starts).reshape(-1),
            send_sizes.reshape(-1),
            (room * lax.axis_index(axis) + starts).reshape(-1),
            _divided(received, pieces)[1].reshape(-1),
            axis_name=axis,
        )


@dataclasses.dataclass(frozen=True)
class _NotOnCPUs:
    """Sends what is needed, or all from a CPU, for which XLA cannot do otherwise."""

    def exchange(
        self, x: jax.Array, sent: jax.Array, received: jax.Array, *, axis: str
    ) -> jax.Array:
        """Computes `exchange`."""
        return lax.platform_dependent(
            x,
            sent,
            received,
            cpu=functools.partial(DENSE.exchange, axis=axis),
            default=functools.partial(RAGGED.exchange, axis=axis),
        )


DENSE, RAGGED, _NOT_ON_CPUS = Dense(), Ragged(), _NotOnCPUs()


def _default(axis: str) -> Any:
    """Returns who exchanges if nobody is chosen.

    Beyond what its kernel serves, XLA refuses, or sends every piece by itself.
    """
    return _NOT_ON_CPUS if _is_served(axis) else DENSE


def _pieces(axis: str) -> int:
    return max(1, _PIECES // lax.axis_size(axis)) if _is_served(axis) else 1


def _is_served(axis: str) -> bool:
    """Returns whether XLA's kernel may exchange along an axis: within one process."""
    mesh = jax.sharding.get_abstract_mesh()
    inner = mesh.axis_names[mesh.axis_names.index(axis) :]
    span = math.prod(mesh.shape[each] for each in inner)  # of neighbors in the mesh
    is_local = jax.process_count() == 1 or jax.local_device_count() % span == 0
    return lax.axis_size(axis) <= _PEERS and is_local


def _divided(sizes: jax.Array, pieces: int) -> tuple[jax.Array, jax.Array]:
    """Returns where pieces of each size begin, and their sizes, int32 [parts, pieces].

    They differ by at most 1.
    """
    ends = sizes[:, None] * jnp.arange(pieces + 1, dtype=jnp.int32)[None] // pieces
    return ends[:, :-1], ends[:, 1:] - ends[:, :-1]
