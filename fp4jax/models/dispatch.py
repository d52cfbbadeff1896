"""Dispatch: tokens go to the devices and the tiles of their experts, and come back.

Where a mesh spreads experts, this runs inside of `jax.shard_map`. Rows of a batch are
spread over data, fsdp and expert, and are the same along tensor; experts are spread
over expert and tensor. Tokens go along expert, to the device that shares their place
along tensor; what the experts return is summed along tensor.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax

from fp4jax.kernels.exchange import exchange
from fp4jax.numerics.groups import Groups
from fp4jax.ops.tiles import Tiles
from fp4jax.sharding import DATA, EXPERT, FSDP, RULES, TENSOR


@dataclasses.dataclass(frozen=True)
class Dispatch:
    """Where the tokens of a batch go: each to the experts that it chose.

    A tile is of one expert and one row of the batch, so that neither its blocks nor its
    random bits depend on how rows and experts are spread.

    Attributes:
      tiles: of a device's own tokens, before they are sent: as many for each device.
      groups: of the tiles that it receives.
      positions: uint32 [t, a], of the tokens that it receives.
      num_positions: of the tokens of all devices, each counted for every expert.
      sizes: int32 [parts] each, the tiles that a device sends to each along expert, and
        that it receives; None where no mesh spreads rows and experts.
      dropped: int32 [b], the choices of each row for which there is no room.
    """

    tiles: Tiles
    groups: Groups
    positions: jax.Array
    num_positions: int
    sizes: tuple[jax.Array, jax.Array] | None
    dropped: jax.Array

    @classmethod
    def of(
        cls,
        experts: jax.Array,
        count: int,
        *,
        rows: int,
        is_spread: bool,
        capacity_factor: float = 0.0,
    ) -> "Dispatch":
        """Returns that of some choices.

        Args:
          experts: int32 [b, t, top_k], those of each token.
          count: number of experts, on all devices.
          rows: of a tile.
          is_spread: whether a mesh spreads rows and experts.
          capacity_factor: room for what each device sends to each, over an equal share
            of it; 0: for all of it.
        """
        b, t, top_k = experts.shape
        parts, tensors, shards, tensor, shard = 1, 1, 1, 0, 0
        if is_spread:
            parts, tensors = lax.axis_size(EXPERT), lax.axis_size(TENSOR)
            shards = lax.axis_size(RULES["batch"])
            tensor, shard = lax.axis_index(TENSOR), lax.axis_index(RULES["batch"])
        here = count // (parts * tensors)  # experts of a device
        device, expert = experts // here, experts % here
        row = jnp.arange(b, dtype=jnp.int32)[:, None, None]
        labels = ((device // tensors) * here + expert) * b + row
        num_groups = parts * here * b
        labels = jnp.where(device % tensors == tensor, labels, num_groups).reshape(-1)
        room = None
        if is_spread and capacity_factor:
            share = min(1.0, capacity_factor / (parts * tensors))
            room = math.ceil(share * labels.size)
        tiles = Tiles.of_labels(
            labels, num_groups, rows=rows, parts=parts, part_rows=room
        )
        of = jnp.where(tiles.of < num_groups, tiles.of // b % here, here)
        num_rows = b * t * top_k
        position = jnp.arange(num_rows, dtype=jnp.uint32)
        first = jnp.asarray(shard * num_rows).astype(jnp.uint32)
        positions = tiles.positions(position + first)
        sizes = None
        if is_spread:
            needed, of = _needed(of, here), _exchanged(of)
            sizes, positions = (needed, _needed(of, here)), _exchanged(positions)
        dropped = jnp.zeros(b, jnp.int32)
        if room is not None:
            has_group = (labels < num_groups).reshape(b, -1)
            dropped = lax.psum(_without_place(tiles, has_group), TENSOR)
        axes = (DATA, FSDP) if is_spread else ()
        groups = Groups.of_entries(of, here, axes)
        return cls(tiles, groups, positions, shards * num_rows, sizes, dropped)

    def send(self, x: jax.Array, *, top_k: int) -> jax.Array:
        """Returns the tiles [t, a, d] of tokens x [b, t, d], for the experts here."""
        # In float32, so that the gradient of a token is summed so over its experts.
        copies = x.astype(jnp.float32)[:, :, None]
        copies = jnp.broadcast_to(copies, (*x.shape[:2], top_k, x.shape[2]))
        copies = copies.astype(x.dtype).reshape(-1, x.shape[2])
        tiles = self.tiles.lay_out(copies)
        if self.sizes is None:
            return tiles
        sent, received = self.sizes
        return exchange(tiles, sent=sent, received=received, axis=EXPERT)

    def combine(self, y: jax.Array, weights: jax.Array) -> jax.Array:
        """Returns the sums [b, t, d] of what the experts return, float32.

        Args:
          y: [t, a, d] tiles.
          weights: float32 [b, t, top_k], of each token's experts.
        """
        if self.sizes is not None:
            sent, received = self.sizes
            y = exchange(y, sent=received, received=sent, axis=EXPERT)
        y = self.tiles.rows_of(y)
        y = y.astype(jnp.float32).reshape(*weights.shape, -1) * weights[..., None]
        y = jnp.sum(y, 2)
        return y if self.sizes is None else lax.psum(y, TENSOR)


def _without_place(tiles: Tiles, has_group: jax.Array) -> jax.Array:
    """Returns how many of the choices [b, ...] that have a group have no place, [b]."""
    has_none = (tiles.of_row >= tiles.of_place.size).reshape(has_group.shape)
    return jnp.sum(has_group & has_none, 1, jnp.int32)


def _needed(of: jax.Array, count: int) -> jax.Array:
    """Returns how many tiles for each device, or of each, have one of its experts."""
    return jnp.sum((of < count).reshape(lax.axis_size(EXPERT), -1), 1, jnp.int32)


def _exchanged(x: jax.Array) -> jax.Array:
    """Sends equal parts of the first axis to the devices along expert."""
    return lax.all_to_all(x, EXPERT, 0, 0, tiled=True)
