"""The operands of a GEMM: quantized along its contraction axis, or cast."""

import dataclasses
import math
from collections.abc import Sequence

import jax

from fp4jax.kernels.quantize import (
    Inputs,
    Output,
    Way,
    Written,
    quantize_blocks,
    quantize_both,
)
from fp4jax.numerics import Quantizer, Site, exact
from fp4jax.numerics.blockwise import Blocks
from fp4jax.numerics.groups import Groups
from fp4jax.ops.dims import flatten
from fp4jax.ops.noise import Noise

# What an operand is read for: a product of bfloat16, or anything.
MULTIPLIED = (Output.OPERAND,)
STORED = (Output.CODES, Output.SCALES)


@dataclasses.dataclass(frozen=True)
class Operand:
    """One input of a GEMM.

    Attributes:
      shape: of the array, the contraction axis padded.
      axis: the contraction axis.
      site: which of the six it is.
      blocks: the quantized array; of square blocks the free axes are one.
      array: what is multiplied where there are no blocks.
      tensor_scale: float32, what is left to multiply the result, or None: a scalar, or
        one for each entry of the first axis, [t, 1, ...].
    """

    shape: tuple[int, ...]
    axis: int
    site: Site
    blocks: Blocks | Written | None = None
    array: jax.Array | None = None
    tensor_scale: jax.Array | None = None

    @property
    def free(self) -> tuple[int, ...]:
        """The shape without the contraction axis."""
        return tuple(n for i, n in enumerate(self.shape) if i != self.axis)

    def decoded(self) -> Blocks:
        """Returns the values and scales of a quantized array."""
        blocks = self.blocks
        assert blocks is not None
        return blocks if isinstance(blocks, Blocks) else blocks.decoded()

    def values(self, dtype: jax.typing.DTypeLike) -> jax.Array:
        """Returns the array that enters the GEMM."""
        if self.blocks is not None:
            return self.blocks.operand(dtype).reshape(self.shape)
        assert self.array is not None
        return exact.cast(self.array, dtype)

    def dequantized(self, shape: tuple[int, ...]) -> jax.Array:
        """Returns the float32 values of the array of some shape that was quantized."""
        assert self.blocks is not None
        x = self.blocks.dequantized().reshape(self.shape)
        return x[tuple(slice(n) for n in shape)]


@dataclasses.dataclass(frozen=True)
class Asked:
    """What an operand shall be, of whatever array.

    Attributes:
      quantizer: None leaves the array as it is.
      site: which stream of the key to draw from.
      noise: of the call.
      amax: float32 [], of the tensor, where it is held; of groups [groups].
      groups: of the first axis, whose tensor scales differ.
      outputs: what will be read of it; codes and scales serve for everything.
    """

    quantizer: Quantizer | None
    site: Site
    noise: Noise
    amax: jax.Array | None = None
    groups: Groups | None = None
    outputs: tuple[Output, ...] = STORED

    def along(self, axis: int, other: int | None) -> tuple[Way, Inputs]:
        """Returns how an array is quantized along an axis; squares along another, too.

        Args:
          axis: the contraction axis.
          other: the second axis of square blocks, if there are such.
        """
        quantizer, site, noise = self.quantizer, self.site, self.noise
        assert quantizer is not None
        other = other if quantizer.is_square else None
        return Way(quantizer, self.outputs, axis, other, site), Inputs(
            key=noise.key,
            amax=self.amax,
            start=noise.start(site) if quantizer.draws else None,
            tokens=noise.tokens(site) if quantizer.draws else None,
            groups=None if quantizer.tensor_scale is None else self.groups,
        )


def make_operand(x: jax.Array, asked: Asked, *, axis: int, batch: int) -> Operand:
    """Quantizes an array whose first `batch` axes are never blocked together.

    Args:
      x: [*batch, ...], the contraction axis first or last of the rest.
      asked: what it shall be.
      axis: the contraction axis, not negative.
      batch: number of batch axes.
    """
    if asked.quantizer is None:
        return Operand(x.shape, axis, asked.site, array=x)
    shape, other, contraction = list(x.shape), None, axis
    if asked.quantizer.is_square:
        # Squares run over the contraction axis and over all free axes as one.
        if axis == batch:
            other = axis + 1
            x = flatten(x, other, x.ndim)
        else:
            x = flatten(x, batch, axis)
            other, contraction = batch, batch + 1
    blocks = quantize_blocks(x, *asked.along(contraction, other))
    shape[axis] = blocks.tiling.shape[contraction]
    return Operand(
        tuple(shape), axis, asked.site, blocks=blocks, tensor_scale=blocks.tensor_scale
    )


def make_both(
    g: jax.Array, batch: int, middle: int, asked: Sequence[Asked]
) -> list[Operand] | None:
    """Quantizes an array along n and along m, where a kernel does from one read of it.

    Args:
      g: [*batch, *m, *n].
      batch: number of batch axes.
      middle: of those and of m.
      asked: of the operand that contracts n, [*batch, *m, n], and of that which
        contracts m, [*batch, m, *n].

    Returns:
      The operands; None where it would be read twice, where devices would exchange
      parts of it, or where more is read of operands than products do.
    """
    inside = [*range(batch + 1, middle), *range(middle + 1, g.ndim)]
    is_cut = any(jax.typeof(g).sharding.spec[i] for i in inside)
    if is_cut or any(each.outputs != MULTIPLIED for each in asked):
        return None
    if any(each.quantizer is None for each in asked):
        return None
    views = flatten(g, middle, g.ndim), flatten(g, batch, middle)
    x = flatten(views[0], batch, middle)  # [*batch, m, n]
    axes = batch + 1, batch
    ways = map(Asked.along, asked, axes, axes[::-1])
    if (written := quantize_both(x, list(ways))) is None:
        return None
    axes = views[0].ndim - 1, batch
    return [
        Operand(view.shape, axis, each.site, blocks=of, tensor_scale=of.tensor_scale)
        for of, view, axis, each in zip(written, views, axes, asked, strict=True)
    ]


def transposed(
    operand: Operand, shape: tuple[int, ...], *, axis: int, site: Site
) -> Operand:
    """Returns an operand of square blocks for a GEMM that contracts the other axis.

    Args:
      operand: of square blocks.
      shape: of the array as the other GEMM sees it.
      axis: what that contracts.
      site: which of the six operands this is.
    """
    blocks = operand.blocks
    assert blocks is not None
    (other,) = (i for i in blocks.tiling.sizes if i != blocks.axis)
    size = blocks.tiling.sizes[other]
    padded = shape[axis] + -shape[axis] % size
    # Of square blocks the contraction axis stands first or last, the free ones as one.
    free = shape[axis + 1 :] if other < blocks.axis else shape[blocks.axis : axis]
    sizes = {other: padded, blocks.axis: math.prod(free)}
    tiling = dataclasses.replace(
        blocks.tiling,
        shape=tuple(sizes.get(i, n) for i, n in enumerate(blocks.tiling.shape)),
    )
    return Operand(
        tuple(padded if i == axis else n for i, n in enumerate(shape)),
        axis,
        site,
        blocks=dataclasses.replace(blocks, tiling=tiling, axis=other),
        tensor_scale=operand.tensor_scale,
    )
