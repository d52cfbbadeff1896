"""Tiles: rows of several groups, laid out so that no block has rows of two."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import lax

from fp4jax.numerics.groups import Groups
from fp4jax.numerics.manual import varying_as
from fp4jax.ops.noise import token_multiple
from fp4jax.recipes import Recipe

# The fewest rows of a tile: a GEMM takes them for the price of one.
_ROWS = 16
# The position of what only fills a tile.
_FILLING = 2**32 - 1


def tile_rows(recipe: Recipe) -> int:
    """Returns the rows of a tile: whole blocks and rotations of every operand."""
    return math.lcm(token_multiple(recipe), _ROWS)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tiles:
    """Where rows [m] stand in tiles [t, a].

    Attributes:
      of_row: int32 [m], the place of each row among the t a; beyond them of none.
      of_place: int32 [t a], the row of each place; m of none.
      of: int32 [t], the group of each tile; `count` where no row needs it.
      count: number of groups.
      rows: of a tile, a.
    """

    of_row: jax.Array
    of_place: jax.Array
    of: jax.Array
    count: int = dataclasses.field(metadata={"static": True})
    rows: int = dataclasses.field(metadata={"static": True})

    @classmethod
    def of_sizes(
        cls,
        sizes: jax.Array,
        num_rows: int,
        *,
        rows: int,
        parts: int = 1,
        part_rows: int | None = None,
    ) -> "Tiles":
        """Returns those of consecutive groups; rows beyond the last have no place.

        tiles of group i = ceil(size_i / a)

        Args:
          sizes: int32 [e], rows of each group.
          num_rows: m, at least the sum of the sizes.
          rows: a, of a tile.
          parts: into which the groups are divided, of equally many groups and tiles.
          part_rows: for which a part has tiles, however they are grouped; further rows
            have no place, the last of it first. None: for all.
        """
        count = sizes.shape[0]
        in_part = count // parts
        most = num_rows if part_rows is None else min(part_rows, num_rows)
        num_tiles = max(1, (most + min(in_part, most) * (rows - 1)) // rows)
        ends = jnp.cumsum(sizes)
        tile_ends = jnp.cumsum((sizes + (rows - 1)) // rows)
        part = jnp.arange(parts, dtype=jnp.int32)
        before = jnp.concatenate([jnp.zeros(1, jnp.int32), tile_ends])[::in_part][:-1]
        # Tiles of a part are numbered as if those before it had just what they need.
        tile = before[:, None] + jnp.arange(num_tiles, dtype=jnp.int32)[None]
        of = _search(tile_ends, tile.reshape(-1))
        needed = tile < tile_ends[in_part - 1 :: in_part][:, None]
        of = jnp.where(needed.reshape(-1), of, count).astype(jnp.int32)
        # A row moves on by what stands between it and the rows before it.
        moved = jnp.concatenate([jnp.zeros(1, jnp.int32), tile_ends * rows - ends])
        moved = moved[:-1] + jnp.repeat((part * num_tiles - before) * rows, in_part)
        moved = jnp.append(moved, parts * num_tiles * rows)
        row = jnp.arange(num_rows, dtype=jnp.int32)
        group = _search(ends, row)
        place = (row + moved[group]).astype(jnp.int32)
        if part_rows is not None:
            end = (group // in_part + 1) * num_tiles * rows  # of the row's part
            place = jnp.where(place < end, place, of.size * rows)
        return cls(place, _inverse(place, of.size * rows), of, count, rows)

    @classmethod
    def of_labels(
        cls,
        labels: jax.Array,
        count: int,
        *,
        rows: int,
        parts: int = 1,
        part_rows: int | None = None,
    ) -> "Tiles":
        """Returns those of rows in any order.

        Args:
          labels: int32 [m], the group of each row; `count` of one without place.
          count: number of groups.
          rows: of a tile.
          parts: as of `of_sizes`.
          part_rows: as of `of_sizes`.
        """
        order = jnp.argsort(labels, stable=True)
        sizes = jnp.zeros(count, jnp.int32).at[labels].add(1, mode="drop")
        tiles = cls.of_sizes(
            sizes, labels.size, rows=rows, parts=parts, part_rows=part_rows
        )
        of_row = tiles.of_row.at[order].set(tiles.of_row, unique_indices=True)
        of_place = _inverse(of_row, tiles.of_place.size)
        return dataclasses.replace(tiles, of_row=of_row, of_place=of_place)

    @property
    def groups(self) -> Groups:
        """The groups of the tiles."""
        return Groups.of_entries(self.of, self.count)

    def lay_out(self, x: jax.Array) -> jax.Array:
        """Lays rows [m, ...] out in tiles [t, a, ...], zeros between them."""
        tiles = _moved(*varying_as((x, self.of_place, self.of_row)))
        return tiles.reshape(-1, self.rows, *x.shape[1:])

    def rows_of(self, y: jax.Array) -> jax.Array:
        """Returns the rows [m, ...] of tiles [t, a, ...]; zeros of rows without one."""
        y = y.reshape(-1, *y.shape[2:])
        return _moved(*varying_as((y, self.of_row, self.of_place)))

    def positions(self, of_rows: jax.Array) -> jax.Array:
        """Returns uint32 [t, a] of uint32 [m]; 2^32 - 1 where no row is."""
        return _taken(of_rows, self.of_place, _FILLING).reshape(-1, self.rows)


@jax.custom_vjp
def _moved(x: jax.Array, source: jax.Array, target: jax.Array) -> jax.Array:
    """Returns y_i = x_{source i}, 0 where there is none.

    Args:
      x: [m, ...].
      source: int32 [p], which row of x each of y is.
      target: int32 [m], which row of y each of x is, by which gradients move.
    """
    del target
    return _taken(x, source, 0)


def _moved_fwd(x, source, target):
    return _moved(x, source, target), (source, target)


def _moved_bwd(where, dy):
    source, target = where
    return _moved(dy, target, source), None, None


_moved.defvjp(_moved_fwd, _moved_bwd)


def _taken(x: jax.Array, source: jax.Array, otherwise: int) -> jax.Array:
    """Returns x_{source i}, something else where there is none."""
    if not len(x):  # from which nothing can be gathered
        return jnp.full((source.size, *x.shape[1:]), otherwise, x.dtype)
    return x.at[source].get(mode="fill", fill_value=otherwise)


def _inverse(place: jax.Array, places: int) -> jax.Array:
    """Returns which row each place has; as many as there are rows where none."""
    row = jnp.arange(place.size, dtype=jnp.int32)
    rows = jnp.full(places, place.size, jnp.int32)
    return rows.at[place].set(row, mode="drop", unique_indices=True)


def _search(ends: jax.Array, values: jax.Array) -> jax.Array:
    # Unrolled it is one loop over values on a GPU.
    return jnp.searchsorted(ends, values, side="right", method="scan_unrolled")


def filled(positions: jax.Array, first: jax.Array | None = None) -> jax.Array:
    """Returns uint32 [t, a], whose random bits each place of tiles gets.

    A rotation fills places without a row. They get bits that no row has: of a position
    of 2^31 or more that depends on that of the tile's first row.

    Args:
      positions: of `Tiles.positions`, those of rows below 2^31.
      first: uint32 [], added to those of rows, or None.
    """
    is_row = positions != jnp.uint32(_FILLING)
    if first is not None:
        positions = positions + first
    size = positions.shape[1]
    place = lax.broadcasted_iota(jnp.uint32, positions.shape, 1)
    filling = positions[:, :1] * jnp.uint32(size) + place | jnp.uint32(2**31)
    return jnp.where(is_row, positions, filling)
