"""Segments: neighboring rows of one group, which a kernel multiplies at once."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fp4jax.numerics.groups import Groups


class Segments(NamedTuple):
    """Which rows of [t a, k] are of one group, at most so many in a segment.

    They follow each other as their rows do. There is room for as many as any groups of
    tiles may need; those beyond `number` have no rows.

    Attributes:
      first: int32 [r], the first row of each.
      rows: int32 [r], how many it has.
      group: int32 [r], the group of its rows; `count` of none.
      number: int32 [1], of segments.
    """

    first: jax.Array
    rows: jax.Array
    group: jax.Array
    number: jax.Array

    @classmethod
    def of(cls, groups: Groups, rows: int, *, most: int) -> "Segments":
        """Returns those of groups of tiles, in whatever order.

        Args:
          groups: of tiles.
          rows: of a tile, a.
          most: rows of a segment; a multiple of `piece(rows, most)`.
        """
        assert groups.of is not None
        size = piece(rows, most)
        of = jnp.repeat(groups.of, rows // size)
        number, at = len(of), jnp.arange(len(of), dtype=jnp.int32)
        differs = jnp.append(True, of[1:] != of[:-1])
        # Where the group changes, then where a segment is full.
        changes = jnp.sort(jnp.where(differs, at, number))
        change = _search(changes, at, side="right") - 1
        starts = (at - changes[change]) % (most // size) == 0
        first = jnp.sort(jnp.where(starts, at, number))
        end = jnp.append(first[1:], number)
        return cls(
            first * size,
            (end - first) * size,
            of.at[first].get(mode="fill", fill_value=groups.count),
            jnp.sum(starts, dtype=jnp.int32).reshape(1),
        )


class Sums(NamedTuple):
    """The segments of each group, those of the most rows before others.

    Attributes:
      first: int32 [r], as of `Segments`.
      rows: int32 [r], likewise.
      bounds: int32 [2 e + 1], where the longest segments of each group begin, and its
        others.
    """

    first: jax.Array
    rows: jax.Array
    bounds: jax.Array

    @classmethod
    def of(cls, groups: Groups, rows: int, *, most: int) -> "Sums":
        """Returns those of groups of tiles, as `Segments.of` does."""
        found = Segments.of(groups, rows, most=most)
        kind = 2 * found.group + (found.rows < most).astype(jnp.int32)
        kind, first, rows_of = lax.sort((kind, found.first, found.rows), num_keys=1)
        kinds = jnp.arange(2 * groups.count + 1, dtype=jnp.int32)
        return cls(first, rows_of, _search(kind, kinds, side="left"))


def piece(rows: int, most: int) -> int:
    """Returns how many rows are of one group, whatever the groups of tiles are."""
    return math.gcd(rows, most)


def _search(x: jax.Array, values: jax.Array, *, side: str) -> jax.Array:
    # Unrolled it is one loop over values on a GPU.
    found = jnp.searchsorted(x, values, side=side, method="scan_unrolled")
    return found.astype(jnp.int32)
