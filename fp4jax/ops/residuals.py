"""Packed operands: what is kept of x for the backward pass, and of w for a step.

The weight gradient is made of the quantized x. Saved as codes and scales, it takes 4.5
bits an element with one-byte scales for 16, 6 with float32 ones, where x takes 16, and
the gradient is the same bit for bit. A weight that several calls multiply by is
quantized once in the same way.
"""

import dataclasses
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name

from fp4jax.kernels.quantize import Output, Quantized, Written
from fp4jax.numerics import Quantizer, Site
from fp4jax.numerics.blocks import Tiling
from fp4jax.ops.operands import Operand

RESIDUAL = "fp4_residual"  # the name that `jax.checkpoint` policies may save


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedOperand:
    """A quantized operand in as few bytes as its formats need.

    Attributes:
      codes: uint8, two elements a byte along the contraction axis for 4-bit grids.
      scales: uint8 codes, or float32 for `F32` scales.
      tensor_scale: as of `Operand`.
      signs: float32 signs of the rotation, or None.
      quantizer: what made it.
      shape: of the operand, the contraction axis padded.
      axis: the contraction axis of the operand.
      site: which of the six the operand is.
      blocked_shape: of the array that was split in blocks.
      blocked_axes: its contraction axis, and the second axis of squares.
    """

    codes: jax.Array
    scales: jax.Array
    tensor_scale: jax.Array | None
    signs: jax.Array | None
    quantizer: Quantizer = dataclasses.field(metadata={"static": True})
    shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    axis: int = dataclasses.field(metadata={"static": True})
    site: Site = dataclasses.field(metadata={"static": True})
    blocked_shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    blocked_axes: tuple[int, ...] = dataclasses.field(metadata={"static": True})


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PackedWeight:
    """A weight as the products of one step multiply by it.

    Attributes:
      fprop: in y = x w; where w is not quantized for it None, or w in another dtype.
      dgrad: in dx = dy w^T; likewise.
      amax: float32 [], or of groups [e], where the recipe holds that of w: what it is
        now.
      shape: of w.
      dtype: of w.
    """

    fprop: PackedOperand | jax.Array | None
    dgrad: PackedOperand | jax.Array | None
    amax: jax.Array | None
    shape: tuple[int, ...] = dataclasses.field(metadata={"static": True})
    dtype: Any = dataclasses.field(metadata={"static": True})


def pack_operand(operand: Operand, quantizer: Quantizer) -> PackedOperand:
    """Packs a quantized operand; `unpack_operand` gives it back bit for bit."""
    blocks = operand.blocks
    assert blocks is not None
    tiling, axis = blocks.tiling, blocks.axis
    return PackedOperand(
        codes=checkpoint_name(blocks.codes(quantizer.grid), RESIDUAL),
        scales=checkpoint_name(blocks.scales(quantizer.scale.format), RESIDUAL),
        tensor_scale=blocks.tensor_scale,
        signs=blocks.signs,
        quantizer=quantizer,
        shape=operand.shape,
        axis=operand.axis,
        site=operand.site,
        blocked_shape=tiling.shape,
        blocked_axes=(axis, *(i for i in tiling.sizes if i != axis)),
    )


def unpack_operand(packed: PackedOperand) -> Operand:
    """Returns the operand that was packed."""
    quantizer, axis = packed.quantizer, packed.blocked_axes[0]
    size = quantizer.block_size
    tiling = Tiling(packed.blocked_shape, dict.fromkeys(packed.blocked_axes, size))
    arrays = {Output.CODES: packed.codes, Output.SCALES: packed.scales}
    quantized = Quantized(arrays, packed.tensor_scale, packed.signs)
    blocks = Written(quantized, quantizer, tiling, axis, axis)
    return Operand(
        packed.shape,
        packed.axis,
        packed.site,
        blocks=blocks,
        tensor_scale=packed.tensor_scale,
    )
