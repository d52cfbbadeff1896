"""Square blocks that can be encoded for FP8 tensor cores: of an array, or of codes."""

import dataclasses
from collections.abc import Sequence
from typing import Protocol

import jax
import jax.numpy as jnp

from fp4jax.kernels import fp8 as kernels
from fp4jax.kernels.quantize.backends import Mosaic
from fp4jax.numerics import Quantizer, exact
from fp4jax.numerics.blockwise import Blocks
from fp4jax.ops import fp8
from fp4jax.ops.fp8 import Scaled
from fp4jax.ops.levels import Levels, levels, of_scales


class Squares(Protocol):
    """A matrix in square blocks that can be encoded."""

    @property
    def quantizer(self) -> Quantizer:
        """Of square blocks under powers of two."""
        ...

    def levels(self) -> Levels:
        """Returns its levels."""
        ...

    def encode(self, powers: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns it and its transpose in E4M3, times powers of two.

        Args:
          powers: float32 [2, r / b, c / b], those of each block, for either.
        """
        ...


@dataclasses.dataclass(frozen=True)
class OfArray:
    """Those that a kernel makes of an array.

    Attributes:
      backend: the kernels.
      array: float32 or bfloat16 [r, c].
      quantizer: of square blocks under powers of two.
      axis: the contraction axis, for quantizers that draw.
      noise: as of `fp4jax.kernels.fp8.encode`.
    """

    backend: Mosaic
    array: jax.Array
    quantizer: Quantizer
    axis: int
    noise: jax.Array | None

    def levels(self) -> Levels:
        """Returns its levels, of its amaxes."""
        return levels(self.backend, self.array, self.quantizer)

    def encode(self, powers: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Calls the kernel."""
        return kernels.encode(
            self.backend,
            self.array,
            self.quantizer,
            powers,
            axis=self.axis,
            noise=self.noise,
        )


@dataclasses.dataclass(frozen=True)
class OfCodes:
    """Those that were quantized, [r, c]; XLA encodes them."""

    blocks: Blocks
    quantizer: Quantizer

    def levels(self) -> Levels:
        """Returns its levels, of its scales."""
        inside = self.blocks.tiling.inside
        is_zero = jnp.all(self.blocks.values == 0, axis=inside)
        return of_scales(jnp.squeeze(self.blocks.scale, inside), is_zero)

    def encode(self, powers: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Multiplies the values of the codes."""
        split, found = self.blocks, []
        for power in powers:
            scale = split.scale * power[:, None, :, None]
            x = split.tiling.join(split.values * scale)
            found.append(x.astype(jnp.float8_e4m3fn))
        return found[0], found[1].T


def encode(
    squares: Squares,
    found: Levels,
    *,
    powers: Sequence[jax.Array | None] = (None, None),
) -> tuple[Scaled, Scaled]:
    """Returns a matrix and its transpose for FP8 tensor cores.

    Args:
      squares: the matrix [r, c].
      found: its levels.
      powers: exponents of what rows and columns of blocks are multiplied by, int32
        [r, 1] and [1, c]; None: what brings the largest to the top.
    """
    grid, side = squares.quantizer.grid, squares.quantizer.block_size
    of_rows, of_columns = (
        fp8.shift(grid) - found.top(along) if power is None else power
        for along, power in zip((1, 0), powers, strict=True)
    )
    shape = found.exponent.shape
    multipliers = [
        jnp.broadcast_to(exact.pow2(power), shape) for power in (of_rows, of_columns)
    ]
    rows, columns = squares.encode(jnp.stack(multipliers))

    def scaled(array: jax.Array, power: jax.Array, along: int) -> Scaled:
        exponent = jnp.repeat(-power.reshape(-1, 1), side, 0)
        return Scaled(array, exponent, found.fit(along, grid))

    return scaled(rows, of_rows, 1), scaled(columns, of_columns, 0)
