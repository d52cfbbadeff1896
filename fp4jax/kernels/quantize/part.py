"""What a device does of a quantization: its part of the array.

    row = sum over free axes of index stride,  column = index,  in the whole array

Random bits depend on where an element stands, and a fresh tensor scale on all of them.
"""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import lax

from fp4jax.kernels.partition import Spread
from fp4jax.kernels.quantize.backends import Backend
from fp4jax.kernels.quantize.outputs import Output
from fp4jax.kernels.quantize.way import Inputs, Start, Way
from fp4jax.numerics import blocks, manual
from fp4jax.numerics.packing import fits_half_a_byte


@dataclasses.dataclass(frozen=True, kw_only=True)
class Call(Way):
    """What is static about one operation of a program that quantizes.

    Its inputs are of no groups, and each stands behind its lanes.

    Attributes:
      backend: who does it.
      length: of the other axis, which is padded to whole blocks.
      lanes: how many leading axes are of arrays that have inputs of their own.
      entries: how many, lanes among them, are of entries with an amax each; 0: none.
    """

    backend: Backend
    length: int | None = None
    lanes: int = 0
    entries: int = 0

    def of_more_rows(self) -> Self:
        """Returns that of an array with one free axis more, its first."""
        other = None if self.other is None else self.other + 1
        return dataclasses.replace(self, axis=self.axis + 1, other=other)

    def of_more_lanes(self) -> Self:
        """Returns that of several arrays, along a first axis."""
        return dataclasses.replace(self.of_more_rows(), lanes=self.lanes + 1)

    def of_a_lane(self) -> Self:
        """Returns that of one of the arrays along the first axis."""
        return dataclasses.replace(self.of_fewer_rows([0]), lanes=self.lanes - 1)

    def of_fewer_rows(self, axes: list[int]) -> Self:
        """Returns that of an array without some of its free axes."""
        axis, other = (
            i if i is None else i - sum(apart < i for apart in axes)
            for i in (self.axis, self.other)
        )
        assert axis is not None
        return dataclasses.replace(self, axis=axis, other=other)

    def treats_rows_alike(self, inputs: Inputs) -> bool:
        """Whether neither the place of a row nor any other row matters to it."""
        is_of_all = self.quantizer.is_stochastic or self.reads_all(inputs)
        is_of_entries = inputs.amax is not None and inputs.amax.ndim > 0
        return self.lanes == 0 and not is_of_all and not is_of_entries

    def reads_all(self, inputs: Inputs) -> bool:
        """Whether a tensor scale is made of the array."""
        return self.quantizer.tensor_scale is not None and inputs.amax is None

    def returns(self, inputs: Inputs) -> tuple[int | None, ...]:
        """How many leading axes of the array each of the results has; None: all."""
        return (None,) * len(self.outputs) + (self.lanes,) * self.reads_all(inputs)

    def quantize(
        self, x: jax.Array, inputs: Inputs, spread: Spread = ()
    ) -> tuple[Any, ...]:
        """Quantizes a part of an array, in whole blocks and runs.

        Args:
          x: the part.
          inputs: of the whole, of the lanes of the part.
          spread: of the whole; () if x is the whole.

        Returns:
          The outputs; with them the amax of the whole, if it had to be read.
        """
        spread = spread or ((),) * x.ndim
        if self.lanes:
            return lane_by_lane(self, x, inputs, spread)
        given = of_all(self, x, inputs, spread)
        start, strides = place(self, x.shape, inputs, spread)
        at = dataclasses.replace(given, start=start)
        return self.results(_quantize_at(self, x, at, strides), given, inputs)

    def results(
        self, outputs: Iterable[Any], given: Inputs, inputs: Inputs
    ) -> tuple[Any, ...]:
        """Returns what `quantize` does, given the outputs and what they are made of."""
        return *outputs, *[given.amax][: self.reads_all(inputs)]

    def elements(self, output: Output, axis: int) -> int:
        """Returns how many elements along an axis one of an output stands for."""
        if output == Output.SCALES and axis in self.axes:
            return self.quantizer.block_size
        is_packed = output == Output.CODES and axis == self.axis
        return 2 if is_packed and fits_half_a_byte(self.quantizer.grid) else 1


def lane_by_lane(
    call: Any, x: jax.Array, inputs: Any, spread: Spread
) -> tuple[Any, ...]:
    """Returns what a call that has lanes makes of a part of them."""
    one = call.of_a_lane()
    return lax.map(lambda lane: one.quantize(*lane, spread[1:]), (x, inputs))


def of_all(call: Call, x: jax.Array, inputs: Inputs, spread: Spread) -> Inputs:
    """Returns inputs of the whole as a backend takes them, given a part."""
    key, amax = inputs.key, inputs.amax
    if key is not None:
        key = jax.random.wrap_key_data(key, impl="threefry2x32")
    if call.reads_all(inputs):
        amax = call.backend.amax(_padded(call, x, x), call, key, call.entries)
        names = [name for axis in spread[call.entries :] for name in axis]
        amax = manual.pmax(amax, names)
    return dataclasses.replace(inputs, key=key, amax=amax)


def place(
    call: Call, shape: tuple[int, ...], inputs: Inputs, spread: Spread
) -> tuple[Start, dict[int, int]]:
    """Returns row and column of a part's first element, and how far rows are apart.

    Where neither matters to a quantization, none.

    Args:
      call: the quantization.
      shape: of the part.
      inputs: of the whole.
      spread: of the whole.
    """
    if not call.quantizer.is_stochastic:
        return None, {}
    sizes, offsets = list(shape), [jnp.uint32(0)] * len(shape)
    for i, names in enumerate(spread):
        if names:
            sizes[i] *= math.prod(lax.axis_size(name) for name in names)
            offset = lax.axis_index(names).astype(jnp.uint32)
            offsets[i] = offset * jnp.uint32(shape[i])
    if call.other is not None and call.length is not None:
        sizes[call.other] = call.length
    free = [i for i in range(len(shape)) if i != call.axis]
    if inputs.tokens is not None:
        free = [i for i in free if i > 1]
    strides = {i: math.prod(sizes[j] for j in free if j > i) for i in free}
    row, column = jnp.uint32(0), offsets[call.axis]
    for i, stride in strides.items():
        row = row + offsets[i] * jnp.uint32(stride % 2**32)
    if inputs.start is not None:
        row, column = row + inputs.start[0], column + inputs.start[1]
    return (row, column), strides


def fits(call: Call, x: jax.Array, strides: dict[int, int]) -> bool:
    """Returns whether a backend takes a part as it lies."""
    shape = _shape_of_padded(call, x)
    return shape == x.shape and not _apart(x, shape, strides)


def _apart(x: jax.Array, shape: tuple[int, ...], strides: dict[int, int]) -> list[int]:
    """Returns the axes along which rows, padded to a shape, are apart in the whole."""
    apart, size = [], 1
    for i in sorted(strides, reverse=True):
        if x.shape[i] > 1 and (apart or strides[i] != size):
            apart.insert(0, i)
        size *= shape[i]
    return apart


def _padded(call: Call, x: jax.Array, array: Any) -> Any:
    """Returns an array, of the first axes of x, as the backend takes x."""
    multiples = call.backend.multiples(x.shape, call)
    return jax.tree.map(lambda a: blocks.pad_to_multiple(a, multiples), array)


def _shape_of_padded(call: Call, x: jax.Array) -> tuple[int, ...]:
    return jax.eval_shape(lambda x: _padded(call, x, x), x).shape


def _quantize_at(
    call: Call, x: jax.Array, inputs: Inputs, strides: dict[int, int]
) -> list[jax.Array]:
    """Quantizes a part; where its rows, padded, are apart in the whole, by pieces.

    Args:
      call: the quantization.
      x: the part.
      inputs: of the whole, but for the start.
      strides: by free axis, how many rows of the whole its neighbors are apart.
    """
    apart = _apart(x, _shape_of_padded(call, x), strides)
    if not apart:
        return _quantize(call, x, inputs)
    assert inputs.start is not None
    (row, column), lengths = inputs.start, [x.shape[i] for i in apart]
    for j, i in enumerate(apart):
        index = lax.broadcasted_iota(jnp.uint32, lengths, j)
        row = row + index * jnp.uint32(strides[i] % 2**32)
    of_each, together = call.of_fewer_rows(apart), strides.keys() - set(apart)
    inside = {i - sum(j < i for j in apart): strides[i] for i in together}
    x = jnp.moveaxis(x, apart, range(len(apart)))
    x = x.reshape(-1, *x.shape[len(apart) :])

    def piece(part: tuple[jax.Array, jax.Array]) -> list[jax.Array]:
        at = dataclasses.replace(inputs, start=(part[1], column))
        return _quantize_at(of_each, part[0], at, inside)

    return [
        jnp.moveaxis(a.reshape(*lengths, *a.shape[1:]), range(len(apart)), apart)
        for a in lax.map(piece, (x, row.reshape(-1)))
    ]


def _quantize(call: Call, x: jax.Array, inputs: Inputs) -> list[jax.Array]:
    """Calls the backend with what it takes, and cuts off what that is more."""
    tokens = _padded(call, x, inputs.tokens)
    inputs = dataclasses.replace(inputs, tokens=tokens)
    found = call.backend.quantize(_padded(call, x, x), call, inputs)
    return [
        _cut(found.arrays[output], call, output, x.shape) for output in call.outputs
    ]


def _cut(
    array: jax.Array, call: Call, output: Output, shape: tuple[int, ...]
) -> jax.Array:
    """Returns an output without what a backend padded."""
    sizes = (-(-n // call.elements(output, i)) for i, n in enumerate(shape))
    return array[tuple(map(slice, sizes))]
