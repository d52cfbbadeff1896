"""A quantized array of which a kernel, or memory, has some outputs."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from fp4jax.kernels.quantize.outputs import Output, Quantized
from fp4jax.numerics import F32, Quantizer, formats, packing
from fp4jax.numerics.blocks import Tiling
from fp4jax.numerics.blockwise import Blocks
from fp4jax.numerics.formats import Format


@dataclasses.dataclass(frozen=True)
class Written:
    """Outputs, and what `Blocks` make of themselves; what is missing is decoded.

    Attributes:
      quantized: the outputs, along the axes of `tiling` of its shape or padded.
      quantizer: what made them.
      tiling: of the array.
      axis: the contraction axis.
      packed_axis: that along which codes share a byte.
    """

    quantized: Quantized
    quantizer: Quantizer
    tiling: Tiling
    axis: int
    packed_axis: int

    @property
    def tensor_scale(self) -> jax.Array | None:
        """As of `Blocks`."""
        return self.quantized.tensor_scale

    @property
    def signs(self) -> jax.Array | None:
        """As of `Blocks`."""
        return self.quantized.signs

    def operand(self, dtype: jax.typing.DTypeLike) -> jax.Array:
        """Returns values scale, the input of the GEMM."""
        found = self.quantized.arrays.get(Output.OPERAND)
        if found is None or dtype != jnp.bfloat16:
            return self.decoded().operand(dtype)
        return self._cut(found)

    def codes(self, grid: Format) -> jax.Array:
        """As of `Blocks`."""
        if self.axis != self.packed_axis:
            return self.decoded().codes(grid)
        shape = list(self.tiling.shape)
        if packing.fits_half_a_byte(grid):
            shape[self.axis] = -(-shape[self.axis] // 2)
        return _cut(self.quantized.arrays[Output.CODES], tuple(shape))

    def scales(self, fmt: Format) -> jax.Array:
        """As of `Blocks`."""
        del fmt
        return _cut(self.quantized.arrays[Output.SCALES], self._shape_of_scales)

    def dequantized(self) -> jax.Array:
        """As of `Blocks`."""
        return self.decoded().dequantized()

    def decoded(self) -> Blocks:
        """Returns the blocks of which the codes and scales are."""
        arrays, quantizer = self.quantized.arrays, self.quantizer
        codes, scales = arrays[Output.CODES], arrays[Output.SCALES]
        if packing.fits_half_a_byte(quantizer.grid):
            codes = packing.unpack(codes, axis=self.packed_axis)
        if quantizer.scale.format != F32:
            scales = formats.decode_magnitude(scales, quantizer.scale.format)
        values = formats.decode(self._cut(codes), quantizer.grid)
        scales = _cut(scales, self._shape_of_scales)
        return Blocks(
            values=self.tiling.split(values),
            scale=lax.expand_dims(scales, self.tiling.inside),
            tensor_scale=self.tensor_scale,
            signs=self.signs,
            tiling=self.tiling,
            axis=self.axis,
        )

    @property
    def _shape_of_scales(self) -> tuple[int, ...]:
        sizes = self.tiling.sizes
        return tuple(n // sizes.get(i, 1) for i, n in enumerate(self.tiling.padded))

    def _cut(self, x: jax.Array) -> jax.Array:
        return _cut(x, self.tiling.shape)


def _cut(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """Returns an array without what is beyond a shape."""
    if x.shape == shape:
        return x  # which may be spread over devices
    return x[tuple(slice(n) for n in shape)]
