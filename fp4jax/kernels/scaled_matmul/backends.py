"""Who multiplies a packed operand: a kernel for a GPU, it interpreted, or XLA."""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import sequential_vmap

from fp4jax.kernels import block_sizes, devices, partition
from fp4jax.kernels.quantize import Written
from fp4jax.kernels.scaled_matmul import reference
from fp4jax.kernels.scaled_matmul.reference import Side
from fp4jax.kernels.tile import CHUNK, Tile
from fp4jax.numerics import packing


@dataclasses.dataclass(frozen=True)
class Xla:
    """The reference, compiled by XLA for every device."""

    def why_not(self, packed, other, *, axis: int, dtype: Any) -> None:
        """It can do every call."""
        del packed, other, axis, dtype

    def multiply(self, packed: Written, other: jax.Array, **how: Any) -> jax.Array:
        """Calls the reference."""
        return reference.scaled_matmul(packed, other, **how)


@dataclasses.dataclass(frozen=True)
class Mosaic:
    """A kernel in Pallas Mosaic GPU, which decodes to registers.

    Attributes:
      interpreted: whether it is interpreted, on any device.
      tile: of a program; None: that of `block_sizes`.
    """

    interpreted: bool = False
    tile: Tile | None = None

    def why_not(
        self, packed: Written, other: jax.Array, *, axis: int, dtype: Any
    ) -> str | None:
        """Asks the device, then what the kernel takes."""
        why = self._where(other) or _unlike(packed, other, dtype)
        return why or self._sizes(packed, other, axis)

    def _where(self, other: jax.Array) -> str | None:
        if self.interpreted:
            return devices.too_old()
        if (why := devices.without_wgmma()) is not None:
            return why
        if partition.is_whole(jax.typeof(other).sharding.mesh):
            return None
        return "no rule divides this kernel over several devices"

    def _sizes(self, packed: Written, other: jax.Array, axis: int) -> str | None:
        shape, k = packed.tiling.shape, other.shape[axis]
        m, n = shape[1 - packed.axis], other.shape[1 - axis]
        tile = self._tile(m, n, k)
        if shape[packed.axis] != k:
            return (
                f"both operands must have {k} elements along the contraction axis, "
                f"got {shape} and {other.shape}"
            )
        if 0 in (m, n, k) or m % tile.m or n % tile.n or k % tile.k:
            return (
                f"m, n and k must be multiples of {tile.m}, {tile.n} and {tile.k}, "
                f"got {m}, {n} and {k}"
            )
        return None

    def multiply(
        self,
        packed: Written,
        other: jax.Array,
        *,
        axis: int,
        side: Side,
        factors: Sequence[jax.Array],
        dtype: Any,
    ) -> jax.Array:
        """Calls the kernel, of scales that lie as their codes."""
        from fp4jax.kernels.scaled_matmul.mosaic import Product

        quantizer = packed.quantizer
        m, n = packed.tiling.shape[1 - packed.axis], other.shape[1 - axis]
        product = Product(
            quantizer.grid,
            quantizer.scale.format,
            quantizer.block_size,
            axis=packed.axis,
            other_axis=axis,
            swapped=side == "rhs",
            dtype=jnp.dtype(dtype),
            tile=self._tile(m, n, other.shape[axis]),
            interpret=devices.interpreter() if self.interpreted else None,
        )
        scales = [jnp.asarray(f, jnp.float32).reshape(1) for f in factors]
        factor = jnp.concatenate(scales) if scales else jnp.ones(1, jnp.float32)
        codes = packed.codes(quantizer.grid)
        return _operation(product)(codes, _scales(packed), other, factor)

    def _tile(self, m: int, n: int, k: int) -> Tile:
        """Returns the tile, of sizes and peers that divide the product."""
        tile = (self.tile or block_sizes.best("product", m * n)).dividing(n)
        depth = CHUNK if k % tile.k else tile.k
        return dataclasses.replace(
            tile,
            k=depth,
            stages=tile.stages * tile.k // depth,
            peers=math.gcd(tile.peers, max(m // tile.m, 1)),
        )


def _unlike(packed: Written, other: jax.Array, dtype: Any) -> str | None:
    """Returns what of the operands no kernel takes, or None."""
    quantizer = packed.quantizer
    if not packing.fits_half_a_byte(quantizer.grid):
        return f"codes must take 4 bits, got those of {quantizer.grid}"
    if len(packed.tiling.shape) != 2 or other.ndim != 2:
        return f"operands must be matrices, got {packed.tiling.shape}, {other.shape}"
    if packed.axis != packed.packed_axis:
        return "codes must share bytes along the contraction axis"
    if CHUNK % quantizer.block_size:
        return f"blocks must divide {CHUNK} elements, got {quantizer.block_size}"
    if other.dtype != jnp.bfloat16:
        return f"the other operand must be bfloat16, got {other.dtype}"
    if jnp.dtype(dtype) not in (jnp.bfloat16, jnp.float32):
        return f"the result must be bfloat16 or float32, got {jnp.dtype(dtype)}"
    return None


def _scales(packed: Written) -> jax.Array:
    """Returns scales [c / block, m], one for each row of the result."""
    quantizer, axis = packed.quantizer, packed.axis
    scales = packed.scales(quantizer.scale.format)
    scales = scales if axis == 0 else scales.T
    if quantizer.is_square:
        scales = jnp.repeat(scales, quantizer.block_size, 1)
    return scales[:, : packed.tiling.shape[1 - axis]]


# Under `jax.vmap` it is what it is lane by lane.
@functools.cache
def _operation(product: Any) -> Any:
    return sequential_vmap(product)


MOSAIC, INTERPRETED, XLA = Mosaic(), Mosaic(interpreted=True), Xla()
