"""What a device does of a quantization: its part of the array.

    row = sum over free axes of index stride,  column = index,  in the whole array

Random bits depend on where an element stands, and a fresh tensor scale on all of them.
"""

import dataclasses
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fp4jax.kernels.partition import Spread
from fp4jax.kernels.quantize.backends import Backend
from fp4jax.kernels.quantize.outputs import Output
from fp4jax.numerics import Quantizer, Site, blocks, exact
from fp4jax.numerics.packing import fits_half_a_byte

Start = tuple[jax.Array, jax.Array] | None  # row and column


@dataclasses.dataclass(frozen=True)
class Call:
    """What is static about a quantization.

    Attributes:
      backend: who does it.
      quantizer: what to make of the array.
      outputs: which arrays to write.
      axis: the contraction axis.
      other: the second axis of square blocks.
      site: which of the key's streams to draw from.
      length: of the other axis, which is padded to whole blocks.
      lanes: how many leading axes are of arrays that have scalars of their own.
    """

    backend: Backend
    quantizer: Quantizer
    outputs: tuple[Output, ...]
    axis: int
    other: int | None
    site: Site
    length: int | None = None
    lanes: int = 0

    def of_more_rows(self) -> "Call":
        """Returns that of an array with one free axis more, its first."""
        other = None if self.other is None else self.other + 1
        return dataclasses.replace(self, axis=self.axis + 1, other=other)

    def of_more_lanes(self) -> "Call":
        """Returns that of several arrays, along a first axis."""
        return dataclasses.replace(self.of_more_rows(), lanes=self.lanes + 1)

    def of_a_lane(self) -> "Call":
        """Returns that of one of the arrays along the first axis."""
        return dataclasses.replace(self.of_fewer_rows([0]), lanes=self.lanes - 1)

    def of_fewer_rows(self, axes: list[int]) -> "Call":
        """Returns that of an array without some of its free axes."""
        axis, other = (
            i if i is None else i - sum(apart < i for apart in axes)
            for i in (self.axis, self.other)
        )
        assert axis is not None
        return dataclasses.replace(self, axis=axis, other=other)

    def treats_rows_alike(self, scalars: "Scalars") -> bool:
        """Whether neither the place of a row nor any other row matters to it."""
        is_of_all = self.quantizer.is_stochastic or self.reads_all(scalars)
        is_of_entries = scalars.amax is not None and scalars.amax.ndim > 0
        return self.lanes == 0 and not is_of_all and not is_of_entries

    def reads_all(self, scalars: "Scalars") -> bool:
        """Whether a tensor scale is made of the array."""
        return self.quantizer.tensor_scale is not None and scalars.amax is None

    @property
    def runs(self) -> dict[int, int]:
        """Of how many elements the runs, or squares, along an axis are."""
        axes = (i for i in (self.axis, self.other) if i is not None)
        return dict.fromkeys(axes, self.quantizer.multiple)

    def returns(self, scalars: "Scalars") -> tuple[bool, ...]:
        """Whether each of the results lies as the array does, or has but its lanes."""
        return (True,) * len(self.outputs) + (False,) * self.reads_all(scalars)

    def quantize(
        self, x: jax.Array, scalars: "Scalars", spread: Spread = ()
    ) -> tuple[Any, ...]:
        """Quantizes a part of an array, in whole blocks and runs.

        Args:
          x: the part.
          scalars: of the whole, of the lanes of the part.
          spread: of the whole; () if x is the whole.

        Returns:
          The outputs; with them the amax of the whole, if it had to be read.
        """
        spread = spread or ((),) * x.ndim
        if self.lanes:
            return lane_by_lane(self, x, scalars, spread)
        inputs = Inputs.of(self, x, scalars, spread)
        first, strides = place(self, x.shape, scalars, spread)
        found = _quantize_at(self, x, inputs, first, strides)
        return self.results(found, inputs, scalars)

    def results(
        self, outputs: Iterable[Any], inputs: "Inputs", scalars: "Scalars"
    ) -> tuple[Any, ...]:
        """Returns what `quantize` does, given the outputs."""
        return *outputs, *[inputs.amax][: self.reads_all(scalars)]

    def elements(self, output: Output, axis: int) -> int:
        """Returns how many elements along an axis one of an output stands for."""
        if output == Output.SCALES and axis in (self.axis, self.other):
            return self.quantizer.block_size
        is_packed = output == Output.CODES and axis == self.axis
        return 2 if is_packed and fits_half_a_byte(self.quantizer.grid) else 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Scalars:
    """What a quantization reads besides its array, each behind its lanes.

    Attributes:
      key: uint32 [2] words of a Threefry key, or None.
      amax: float32 [] of the rotated array, or [t] of each entry of its first axis; or
        None.
      start: uint32 [], row and column of the first element, or None: (0, 0).
      tokens: uint32 [t, a] of an array [t, a, f], whose random bits its rows get, where
        that is not said by where they stand, or None.
    """

    key: jax.Array | None = None
    amax: jax.Array | None = None
    start: Start = None
    tokens: jax.Array | None = None


def lane_by_lane(
    call: Any, x: jax.Array, scalars: Any, spread: Spread
) -> tuple[Any, ...]:
    """Returns what a call that has lanes makes of a part of them."""
    one = call.of_a_lane()
    return lax.map(lambda lane: one.quantize(*lane, spread[1:]), (x, scalars))


class Inputs(NamedTuple):
    """What all elements are quantized with."""

    key: jax.Array | None
    amax: jax.Array | None
    tokens: jax.Array | None

    @classmethod
    def of(cls, call: Call, x: jax.Array, scalars: Scalars, spread: Spread) -> "Inputs":
        """Returns those of a call, of the whole, given a part."""
        key, amax = scalars.key, scalars.amax
        if key is not None:
            key = jax.random.wrap_key_data(key, impl="threefry2x32")
        if call.reads_all(scalars):
            how: dict[str, Any] = {"axis": call.axis, "key": key, "site": call.site}
            amax = call.backend.amax(_padded(call, x, x), call.quantizer, **how)
            if names := tuple(name for axis in spread for name in axis):
                amax = exact.float_of(lax.pmax(exact.bits_of(amax), names))
        return cls(key, amax, scalars.tokens)


def _quantize(
    call: Call, x: jax.Array, inputs: Inputs, start: Start
) -> list[jax.Array]:
    """Calls the backend with what it takes, and cuts off what that is more."""
    tokens = _padded(call, x, inputs.tokens)
    how = way(call, inputs._replace(tokens=tokens), start)
    found = call.backend.quantize(_padded(call, x, x), **how)
    return [
        _cut(found.arrays[output], call, output, x.shape) for output in call.outputs
    ]


def way(call: Call, inputs: Inputs, start: Start) -> dict[str, Any]:
    """Returns how a backend quantizes an array that begins at some row and column."""
    names = "quantizer", "outputs", "axis", "other", "site"
    fields = {name: getattr(call, name) for name in names}
    return fields | inputs._asdict() | {"start": start}


def _padded(call: Call, x: jax.Array, array: Any) -> Any:
    """Returns an array, of the first axes of x, as the backend takes x."""
    axes = {"axis": call.axis, "other": call.other}
    multiples = call.backend.multiples(x.shape, call.quantizer, **axes)
    return jax.tree.map(lambda a: blocks.pad_to_multiple(a, multiples), array)


def place(
    call: Call, shape: tuple[int, ...], scalars: Scalars, spread: Spread
) -> tuple[Start, dict[int, int]]:
    """Returns row and column of a part's first element, and how far rows are apart.

    Where neither matters to a quantization, none.

    Args:
      call: the quantization.
      shape: of the part.
      scalars: of the whole.
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
    if scalars.tokens is not None:
        free = [i for i in free if i > 1]
    strides = {i: math.prod(sizes[j] for j in free if j > i) for i in free}
    row, column = jnp.uint32(0), offsets[call.axis]
    for i, stride in strides.items():
        row = row + offsets[i] * jnp.uint32(stride % 2**32)
    if scalars.start is not None:
        row, column = row + scalars.start[0], column + scalars.start[1]
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


def _shape_of_padded(call: Call, x: jax.Array) -> tuple[int, ...]:
    return jax.eval_shape(lambda x: _padded(call, x, x), x).shape


def _quantize_at(
    call: Call,
    x: jax.Array,
    inputs: Inputs,
    first: Start,
    strides: dict[int, int],
) -> list[jax.Array]:
    """Quantizes a part; where its rows, padded, are apart in the whole, by pieces.

    Args:
      call: the quantization.
      x: the part.
      inputs: of the whole.
      first: row and column of the first element.
      strides: by free axis, how many rows of the whole its neighbors are apart.
    """
    apart = _apart(x, _shape_of_padded(call, x), strides)
    if not apart:
        return _quantize(call, x, inputs, first)
    assert first is not None
    (row, column), lengths = first, [x.shape[i] for i in apart]
    for j, i in enumerate(apart):
        index = lax.broadcasted_iota(jnp.uint32, lengths, j)
        row = row + index * jnp.uint32(strides[i] % 2**32)
    of_each, together = call.of_fewer_rows(apart), strides.keys() - set(apart)
    inside = {i - sum(j < i for j in apart): strides[i] for i in together}
    x = jnp.moveaxis(x, apart, range(len(apart)))
    x = x.reshape(-1, *x.shape[len(apart) :])

    def piece(part: tuple[jax.Array, jax.Array]) -> list[jax.Array]:
        return _quantize_at(of_each, part[0], inputs, (part[1], column), inside)

    return [
        jnp.moveaxis(a.reshape(*lengths, *a.shape[1:]), range(len(apart)), apart)
        for a in lax.map(piece, (x, row.reshape(-1)))
    ]


def _cut(
    array: jax.Array, call: Call, output: Output, shape: tuple[int, ...]
) -> jax.Array:
    """Returns an output without what a backend padded."""
    sizes = (-(-n // call.elements(output, i)) for i, n in enumerate(shape))
    return array[tuple(map(slice, sizes))]
