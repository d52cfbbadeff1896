"""How an array is quantized: what is static about it, and what is read beside it."""

import dataclasses

import jax

from fp4jax.kernels.quantize.outputs import Output
from fp4jax.numerics import Quantizer, Site
from fp4jax.numerics.groups import Groups

Start = tuple[jax.Array, jax.Array] | None  # row and column


@dataclasses.dataclass(frozen=True)
class Way:
    """What is static about a quantization.

    Attributes:
      quantizer: what to make of the array.
      outputs: which arrays to write.
      axis: the contraction axis, not negative.
      other: the second axis of square blocks.
      site: which of the key's streams to draw from.
    """

    quantizer: Quantizer
    outputs: tuple[Output, ...]
    axis: int
    other: int | None = None
    site: Site = Site.FPROP_X

    @property
    def axes(self) -> tuple[int, ...]:
        """Those that are blocked."""
        return (self.axis,) if self.other is None else (self.axis, self.other)

    @property
    def runs(self) -> dict[int, int]:
        """Of how many elements the runs, or squares, along an axis are."""
        return dict.fromkeys(self.axes, self.quantizer.multiple)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Inputs:
    """What a quantization reads beside its array.

    Attributes:
      key: for quantizers that draw, or None; of a `Call` uint32 [2], its words.
      amax: float32 [] of the rotated array, [t] of each entry of its first axis, or of
        groups [e]; None: that of the array at hand.
      start: uint32 [], row and column of the first element, or None: (0, 0).
      tokens: uint32 [t, a] of an array [t, a, f], whose random bits its rows get, where
        that is not said by where they stand, or None.
      groups: of the first axis, which have a tensor scale each, or None.
    """

    key: jax.Array | None = None
    amax: jax.Array | None = None
    start: Start = None
    tokens: jax.Array | None = None
    groups: Groups | None = None
