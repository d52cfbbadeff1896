"""Who multiplies groups of rows in place of a scan: kernels for NVIDIA Hopper GPUs.

They are chosen by themselves on a Hopper GPU. Elsewhere, to be lowered for one:
`with KERNELS(Kernels(products=HOPPER)): ...`, around what is traced.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import sequential_vmap

from fp4jax.kernels import block_sizes, devices, partition
from fp4jax.kernels.choice import Products
from fp4jax.kernels.grouped_matmul.segments import Segments, Sums, piece
from fp4jax.kernels.tile import Tile
from fp4jax.numerics.groups import Groups

_MULTIPLE = 128  # features on either side, and the fewest rows
_ROWS = 16  # of a tile, or a multiple
_WRITTEN = (jnp.bfloat16, jnp.float32)


@dataclasses.dataclass(frozen=True)
class Hopper:
    """Kernels in Pallas Mosaic GPU.

    Attributes:
      interpreted: whether they are interpreted, on any device.
      tile: of a program, narrower where the result is; None: that of the device.
    """

    interpreted: bool = False
    tile: Tile | None = None

    @property
    def products(self) -> Products:
        """What `Kernels` takes."""
        return Products(self.why_not, self.rows, self.weights)

    def why_not(
        self, x: jax.Array, sizes: tuple[int, int], precision: Any
    ) -> str | None:
        """Returns what of tiles [t, a, k], features k and n they do not take, or None.

        Raises:
          NotImplementedError: they cannot run, whatever the tiles.
        """
        why = devices.too_old()
        if why is None and not self.interpreted and devices.default().platform == "gpu":
            why = devices.without_wgmma()  # a CPU may lower for a GPU that is elsewhere
        if why is not None:
            raise NotImplementedError(
                f"grouped products: the kernels for Hopper GPUs cannot run: {why}. "
                "Enter KERNELS without them."
            )
        t, a, _ = x.shape
        mesh = jax.typeof(x).sharding.mesh
        if not self._has_whole(x) and not mesh.empty:
            return f"tiles must not be of the mesh {dict(mesh.shape)} outside shard_map"
        if x.dtype != jnp.bfloat16:
            return f"operands must be bfloat16, got {x.dtype}"
        if not _is_met(precision):
            return f"precision must not be an algorithm, got {precision}"
        if any(size % _MULTIPLE or not size for size in sizes):
            return f"features must be multiples of {_MULTIPLE}, got {sizes}"
        if a % _ROWS or t * a < _MULTIPLE:
            return (
                f"tiles must be of a multiple of {_ROWS} rows, and of {_MULTIPLE} in "
                f"all, got {t} of {a}"
            )
        return None

    def rows(
        self,
        x: jax.Array,
        w: jax.Array,
        groups: Groups,
        *,
        axis: int,
        factors: Sequence[jax.Array] = (),
        dtype: Any,
    ) -> jax.Array:
        """Computes `fp4jax.ops.grouped_matmul.rows`."""
        from fp4jax.kernels.grouped_matmul.mosaic import Rows

        (t, a, k), n = x.shape, w.shape[3 - axis]
        tile = self._tile("grouped_rows", t * a * n, n)
        tile = _with_peers(tile, n // tile.n)
        product = Rows(
            dtype=_written(dtype),
            piece=piece(a, tile.m),
            tile=tile,
            interpret=self._interpreter,
            axis=axis,
            count=groups.count,
        )
        segments = Segments.of(groups, a, most=tile.m)
        multiply = _operation(product, has_whole=self._has_whole(x))
        y = multiply(x.reshape(t * a, k), w, segments, tuple(factors))
        return y.reshape(t, a, n).astype(dtype)

    def weights(
        self,
        x: jax.Array,
        dy: jax.Array,
        groups: Groups,
        *,
        factors: Sequence[jax.Array] = (),
        dtype: Any,
    ) -> jax.Array:
        """Computes `fp4jax.ops.grouped_matmul.weights`."""
        from fp4jax.kernels.grouped_matmul.mosaic import Weights

        (t, a, k), n = x.shape, dy.shape[2]
        tile = self._tile("grouped_weights", groups.count * k * n, n)
        tile = _with_peers(tile, k // tile.m)
        product = Weights(
            dtype=_written(dtype),
            piece=piece(a, tile.k),
            tile=tile,
            interpret=self._interpreter,
        )
        sums = Sums.of(groups, a, most=tile.k)
        multiply = _operation(product, has_whole=self._has_whole(x))
        x, dy = x.reshape(t * a, k), dy.reshape(t * a, n)
        return multiply(x, dy, sums, tuple(factors)).astype(dtype)

    def _has_whole(self, x: jax.Array) -> bool:
        """Returns whether a device is known to have all of an array, or its part.

        Without a mesh it is one of several, as most often, or all of them are.
        """
        return self.interpreted or partition.is_whole(jax.typeof(x).sharding.mesh)

    def _tile(self, kernel: str, elements: int, n: int) -> Tile:
        return (self.tile or block_sizes.best(kernel, elements)).dividing(n)

    @property
    def _interpreter(self) -> Any:
        return devices.interpreter() if self.interpreted else None


def _with_peers(tile: Tile, neighbors: int) -> Tile:
    """Returns the tile, of as many peers as divide its neighbors along one side."""
    return dataclasses.replace(tile, peers=math.gcd(tile.peers, neighbors))


def _is_met(precision: Any) -> bool:
    """Returns whether products of bfloat16 with float32 sums have a precision.

    They have any but an algorithm, for instance of float16 sums.
    """
    each = precision if isinstance(precision, tuple) else (precision,)
    names = None, *lax.Precision, *(p.name.lower() for p in lax.Precision)
    return all(p in names for p in each)


def _written(dtype: Any) -> Any:
    """Returns in what dtype a kernel writes a result."""
    return jnp.dtype(dtype if dtype in _WRITTEN else jnp.float32)


# Under `jax.vmap` it is what it is lane by lane.
@functools.cache
def _operation(product: Any, *, has_whole: bool) -> Any:
    return sequential_vmap(product if has_whole else partition.everywhere(product))


HOPPER = Hopper().products


def of_device() -> Products | None:
    """Returns what multiplies groups by itself: these kernels on a Hopper GPU."""
    return HOPPER if devices.without_wgmma() is None else None
