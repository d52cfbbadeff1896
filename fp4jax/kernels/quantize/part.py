"""What a device does of a quantization: its part of the array.

    row = sum over free axes of index stride,  column = index,  in the whole array

Random bits depend on where an element stands, and a fresh tensor scale on all of them.
"""

import dataclasses
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fp4jax.kernels.partition import Spread
from fp4jax.kernels.quantize.backends import Backend
from fp4jax.kernels.quantize.outputs import Output
from fp4jax.numerics import Quantizer, Site, blocks, exact
from fp4jax.numerics.packing import fits_half_a_byte


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
    start: tuple[jax.Array, jax.Array] | None = None
    tokens: jax.Array | None = None


def quantize(
    call: Call, x: jax.Array, scalars: Scalars, spread: Spread = ()
) -> tuple[Any, ...]:
    """Quantizes a part of an array, in whole blocks and runs.

    Args:
      call: the quantization.
      x: the part.
      scalars: of the whole, of the lanes of the part.
      spread: of the whole; () if x is the whole.

    Returns:
      The outputs; with them the amax of the whole, if it had to be read.
    """
    spread = spread or ((),) * x.ndim
    if call.lanes:
        of_a_lane = call.of_a_lane()
        return lax.map(
            lambda lane: quantize(of_a_lane, lane[0], lane[1], spread[1:]),
            (x, scalars),
        )
    inputs = _Inputs.of(call, x, scalars, spread)
    if call.quantizer.is_stochastic:
        first, strides = _place(call, x.shape, scalars, spread)
        found = _quantize_at(call, x, inputs, first, strides)
    else:
        found = _quantize(call, x, inputs, None)
    return (*found, inputs.amax) if call.reads_all(scalars) else tuple(found)


class _Inputs(NamedTuple):
    """What all elements are quantized with."""

    key: jax.Array | None
    amax: jax.Array | None
    tokens: jax.Array | None

    @classmethod
    def of(
        cls, call: Call, x: jax.Array, scalars: Scalars, spread: Spread
    ) -> "_Inputs":
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
    call: Call,
    x: jax.Array,
    inputs: _Inputs,
    start: tuple[jax.Array, jax.Array] | None,
) -> list[jax.Array]:
    """Calls the backend with what it takes, and cuts off what that is more."""
    found = call.backend.quantize(
        _padded(call, x, x),
        call.quantizer,
        outputs=call.outputs,
        axis=call.axis,
        other=call.other,
        start=start,
        site=call.site,
        key=inputs.key,
        amax=inputs.amax,
        tokens=_padded(call, x, inputs.tokens),
    )
    return [
        _cut(found.arrays[output], call, output, x.shape) for output in call.outputs
    ]


def _padded(call: Call, x: jax.Array, array: Any) -> Any:
    """Returns an array, of the first axes of x, as the backend takes x."""
    axes = {"axis": call.axis, "other": call.other}
    multiples = call.backend.multiples(x.shape, call.quantizer, **axes)
    return jax.tree.map(lambda a: blocks.pad_to_multiple(a, multiples), array)


def _place(
    call: Call, shape: tuple[int, ...], scalars: Scalars, spread: Spread
) -> tuple[tuple[jax.Array, jax.Array], dict[int, int]]:
    """Returns row and column of a part's first element, and how far rows are apart.

    Args:
      call: the quantization.
      shape: of the part.
      scalars: of the whole.
      spread: of the whole.
    """
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


def _quantize_at(
    call: Call,
    x: jax.Array,
    inputs: _Inputs,
    first: tuple[jax.Array, jax.Array],
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
    apart, size = [], 1
    shape = jax.eval_shape(lambda x: _padded(call, x, x), x).shape
    for i in sorted(strides, reverse=True):
        if x.shape[i] > 1 and (apart or strides[i] != size):
            apart.insert(0, i)
        size *= shape[i]
    if not apart:
        return _quantize(call, x, inputs, first)
    row, lengths = first[0], [x.shape[i] for i in apart]
    for j, i in enumerate(apart):
        index = lax.broadcasted_iota(jnp.uint32, lengths, j)
        row = row + index * jnp.uint32(strides[i] % 2**32)
    of_each, together = call.of_fewer_rows(apart), strides.keys() - set(apart)
    inside = {i - sum(j < i for j in apart): strides[i] for i in together}
    x = jnp.moveaxis(x, apart, range(len(apart)))
    x = x.reshape(-1, *x.shape[len(apart) :])

    def piece(part: tuple[jax.Array, jax.Array]) -> list[jax.Array]:
        return _quantize_at(of_each, part[0], inputs, (part[1], first[1]), inside)

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
