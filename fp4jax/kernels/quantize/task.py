"""What a program of a kernel makes of its tile of a matrix."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fp4jax.kernels import planes
from fp4jax.kernels.geometry import Geometry, Where
from fp4jax.kernels.quantize.matrix import Scalars
from fp4jax.kernels.quantize.outputs import Output
from fp4jax.numerics import F32, Quantizer


@dataclasses.dataclass(frozen=True)
class Task:
    """The quantization of a matrix, tile by tile.

    Attributes:
      geometry: the tiles.
      quantizer: of nearest or stochastic rounding, without candidates.
      outputs: what to write.
      scalars: further inputs.
    """

    geometry: Geometry
    quantizer: Quantizer
    outputs: Sequence[Output]
    scalars: Scalars

    def inputs(self, x: jax.Array) -> list[jax.Array]:
        """Returns what is read: the matrix as the geometry views it, and scalars."""
        return [x.reshape(self.geometry.view), *self.scalars.arrays.values()]

    @property
    def out_types(self) -> list[jax.ShapeDtypeStruct]:
        """Of the outputs, as the geometry writes them."""
        return [self._out_type(output) for output in self.outputs]

    def run(self, where: Where, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        """Quantizes a tile, inside of a kernel.

        Args:
          where: the tile.
          inputs: references to `inputs`.
          outputs: references to arrays of `out_types`.
        """
        x_ref, *refs = inputs
        geometry, quantizer = self.geometry, self.quantizer
        given = dict(zip(self.scalars.arrays, refs, strict=True))
        signs: Any = self.scalars.signs
        factor = uniform = None
        if "signs" in given:
            signs = [given["signs"][i] for i in range(len(signs))]
        if "factor" in given:
            factor = geometry.factor(where, given["factor"])
        if quantizer.is_stochastic:
            uniform = geometry.uniform(where, given["noise"], given.get("tokens"))
        quantized = planes.quantize(
            geometry.load(x_ref, where),
            quantizer,
            signs=signs,
            factor=factor,
            uniform=uniform,
            size=geometry.planes_of_block,
            across=geometry.across,
            instructions=geometry.instructions,
        )
        for output, ref in zip(self.outputs, outputs, strict=True):
            self._store(output, ref, where, quantized)

    def matrices(self, arrays: Sequence[jax.Array]) -> dict[Output, jax.Array]:
        """Returns as matrices what was written."""
        geometry = self.geometry
        return {
            output: geometry.block_matrix(array)
            if output == Output.SCALES
            else geometry.matrix(array)
            for output, array in zip(self.outputs, arrays, strict=True)
        }

    def _store(
        self, output: Output, ref: Any, where: Where, quantized: planes.Quantized
    ) -> None:
        geometry, quantizer = self.geometry, self.quantizer
        match output:
            case Output.OPERAND:
                operand = planes.operand(quantized, jnp.bfloat16)
                geometry.store(ref, where, operand)
            case Output.CODES:
                how = geometry.word, geometry.instructions
                words = planes.packed(quantized, quantizer, *how)
                geometry.store(ref, where, words)
            case Output.SCALES:
                codes = planes.scale_codes(quantized, quantizer, geometry.instructions)
                geometry.store_blocks(ref, where, codes)

    def _out_type(self, output: Output) -> jax.ShapeDtypeStruct:
        geometry, quantizer = self.geometry, self.quantizer
        match output:
            case Output.OPERAND:
                return geometry.elements(16, jnp.bfloat16)
            case Output.CODES:
                return geometry.elements(planes.code_bits(quantizer.grid), jnp.uint8)
            case Output.SCALES:
                is_float = quantizer.scale.format == F32
                return geometry.blocks(jnp.float32 if is_float else jnp.uint8)
