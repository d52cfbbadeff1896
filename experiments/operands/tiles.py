"""Tensors of a step cut into equal squares, so that one program quantizes all of them.

Blocks and rotations of at most the size of a tile lie inside of one, along its rows and
along its columns. Compiled for the shape of each tensor, every quantizer would take a
minute.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.operands.captures import Capture
from fp4jax import Operands, dequantize, quantize, stats
from fp4jax.numerics import UNIFORM, Hadamard, Quantizer

MOST = 128
Layers = dict[str, Operands]


class Tiles:
    """The tiles of all tensors of a step.

    Args:
      capture: of the step.

    Attributes:
      capture: of the step.
      layers: operands by path.
      size: of a tile, the largest that divides all shapes, and at most 128.
    """

    def __init__(self, capture: Capture):
        self.capture, self.layers = capture, capture.layers
        tensors = jax.tree.leaves(self.layers)
        shapes = itertools.chain.from_iterable(x.shape for x in tensors)
        self.size = math.gcd(MOST, *shapes)
        cut = [_cut(np.asarray(x), self.size) for x in tensors]
        self._counts = [len(tiles) for tiles in cut]
        self._tiles = np.concatenate(cut)
        self._amaxes: dict[Hadamard | None, np.ndarray] = {}

    def __len__(self) -> int:
        return len(self._tiles)

    def map(self, function: Callable, *more: np.ndarray) -> Any:
        """Returns what a jitted function of all tiles returns, in numpy."""
        return jax.device_get(function(self._tiles, *more))

    def joined(self, tiles: np.ndarray) -> Layers:
        """Returns the tensors that tiles are of."""
        return self.of_tensors([tiles], lambda x, tiles: _join(tiles[0], x.shape))

    def means(self, values: np.ndarray) -> Layers:
        """Returns the mean over its tiles in place of each tensor."""
        return self.of_tensors([values], lambda _, values: values[0].mean(0))

    def amaxes(self, quantizer: Quantizer) -> np.ndarray:
        """Returns for each tile the amaxes of both rotated views of its tensor, [n, 2].

        [n, 0] for a quantizer without a tensor scale, which takes none.
        """
        if quantizer.tensor_scale is None:
            return np.zeros((len(self), 0), np.float32)
        rotation = quantizer.rotation
        if rotation not in self._amaxes:
            values = self.map(_amaxes(rotation))
            ends = np.cumsum([0, *self._counts[:-1]])
            largest = np.maximum.reduceat(values, ends)
            self._amaxes[rotation] = np.repeat(largest, self._counts, axis=0)
        return self._amaxes[rotation]

    def of_tensors(self, values: Sequence[np.ndarray], function: Callable) -> Layers:
        """Returns a function of each tensor, and of what there is of its tiles."""
        ends = np.cumsum(self._counts)[:-1]
        parts = zip(*(np.split(value, ends) for value in values), strict=True)
        tensors, tree = jax.tree.flatten(self.layers)
        found = [function(x, part) for x, part in zip(tensors, parts, strict=True)]
        return jax.tree.unflatten(tree, found)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Views:
    """Tensors quantized along their rows and along their columns.

    Attributes:
      rows, columns: dequantized.
      row_use, column_use: share of elements at every magnitude of the grid.
    """

    rows: Layers
    columns: Layers
    row_use: Layers
    column_use: Layers


def quantized(tiles: Tiles, quantizer: Quantizer) -> Views:
    """Returns both views of all tensors under a quantizer without squares."""
    found = tiles.map(_views(quantizer), tiles.amaxes(quantizer))
    rows, columns, row_use, column_use = found
    return Views(
        rows=tiles.joined(rows),
        columns=tiles.joined(columns),
        row_use=tiles.means(row_use),
        column_use=tiles.means(column_use),
    )


def distributed(tiles: Tiles, quantizer: Quantizer) -> tuple[Layers, Layers]:
    """Returns `crest` and `kurtosis` of both views of all tensors, a dict of each."""
    found = tiles.map(_distributions(quantizer))
    return (
        tiles.of_tensors(found[:2], _distribution),
        tiles.of_tensors(found[2:], _distribution),
    )


@functools.cache
def _amaxes(rotation: Hadamard | None) -> Callable:
    """Returns a function of tiles to the amaxes of their rotated views, [n, 2]."""
    quantizer = Quantizer(UNIFORM, rotation=rotation)

    def of_tile(x: jax.Array) -> jax.Array:
        views = [stats.rotated(x, quantize(x, quantizer)) for x in (x, x.T)]
        return jnp.stack([jnp.max(jnp.abs(view)) for view in views])

    return jax.jit(lambda tiles: jax.lax.map(of_tile, tiles))


@functools.lru_cache(maxsize=2)
def _views(quantizer: Quantizer) -> Callable:
    """Returns a function of tiles and amaxes to what `Views` is made of."""

    def of_view(x: jax.Array, amax: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        q = quantize(x, quantizer, amax=amax)
        return dequantize(q), stats.occupancy(q)

    def of_tile(each: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
        x, amax = each
        of_rows, of_columns = (None, None) if not amax.size else (amax[0], amax[1])
        rows, row_use = of_view(x, of_rows)
        columns, column_use = of_view(x.T, of_columns)
        return rows, columns.T, row_use, column_use

    def of_tiles(tiles: jax.Array, amaxes: jax.Array) -> tuple[jax.Array, ...]:
        return jax.lax.map(of_tile, (tiles, amaxes))

    return jax.jit(of_tiles)


@functools.lru_cache(maxsize=2)
def _distributions(quantizer: Quantizer) -> Callable:
    """Returns a function of tiles to the crest and the elements of both views."""

    def of_tile(x: jax.Array) -> list[jax.Array]:
        found = []
        for view in (x, x.T):
            q = quantize(view, quantizer)
            found += [stats.crest_factor(view, q), stats.rotated(view, q)]
        return found

    return jax.jit(lambda tiles: jax.lax.map(of_tile, tiles))


def _distribution(_: Any, parts: Sequence[np.ndarray]) -> dict[str, float]:
    """Returns the figures of a tensor from those of its tiles."""
    crest, x = parts
    kurtosis = stats.kurtosis(jnp.asarray(x))
    return {"crest": float(np.median(crest)), "kurtosis": float(kurtosis)}


def _cut(x: np.ndarray, size: int) -> np.ndarray:
    """Returns the [size, size] tiles of a matrix, those of its first rows first."""
    m, n = x.shape
    tiles = x.reshape(m // size, size, n // size, size).swapaxes(1, 2)
    return tiles.reshape(-1, size, size)


def _join(tiles: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """Returns the matrix that tiles were cut of."""
    size = tiles.shape[1]
    m, n = shape
    rows = tiles.reshape(m // size, n // size, size, size).swapaxes(1, 2)
    return rows.reshape(m, n)
