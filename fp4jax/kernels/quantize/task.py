"""What programs of a kernel make of their tiles of a matrix."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fp4jax.kernels import planes
from fp4jax.kernels.geometry import Geometry, Where, launch
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
        if Output.OPERAND in self.outputs:  # then there are values to find codes of
            quantized = quantized._replace(unrounded=None)
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


def perform(
    tasks: Sequence[Task], x: jax.Array, *, interpret: Any = None
) -> list[dict[Output, jax.Array]]:
    """Performs several tasks in one kernel, which reads their array once.

    Neighboring programs do tiles of different tasks at one place of the array: what one
    has read from memory, the others find in the cache.

    Args:
      tasks: of nearest or stochastic rounding, without candidates.
      x: float32 or bfloat16, the array of all of them.
      interpret: as `plgpu.kernel` takes it.

    Returns:
      The outputs of each task.
    """
    inputs, out_types = [task.inputs(x) for task in tasks], [t.out_types for t in tasks]

    def kernel(*refs):
        references = iter(refs)
        read = [[next(references) for _ in each] for each in inputs]
        written = [[next(references) for _ in each] for each in out_types]
        which, tiles = _of_program(tasks)

        def of_task(i: int) -> None:
            where = tasks[i].geometry.where(tiles[i])
            tasks[i].run(where, read[i], written[i])

        lax.switch(which, [functools.partial(of_task, i) for i in range(len(tasks))])

    found = launch(
        kernel,
        *itertools.chain(*inputs),
        programs=sum(task.geometry.programs for task in tasks),
        out_type=[*itertools.chain(*out_types)],
        interpret=interpret,
    )
    arrays = iter(found)
    return [task.matrices([next(arrays) for _ in task.outputs]) for task in tasks]


def _of_program(tasks: Sequence[Task]) -> tuple[Any, list[Any]]:
    """Returns which task this program is of, and the number of its tile in each.

    They take turns, in which each has the share of programs that it has of them all.
    """
    counts = [task.geometry.programs for task in tasks]
    shares = [count // math.gcd(*counts) for count in counts]
    starts = [*itertools.accumulate(shares[:-1], initial=0)]
    turn, place = divmod(lax.axis_index("program"), sum(shares))
    which = sum((place >= start).astype(jnp.int32) for start in starts[1:])
    pairs = zip(shares, starts, strict=True)
    return which, [turn * share + place - start for share, start in pairs]
