"""Fused quantization by the reference: what every backend must equal."""

import jax
import jax.numpy as jnp

from fp4jax.kernels.quantize.outputs import Output, Quantized
from fp4jax.kernels.quantize.way import Inputs, Way
from fp4jax.numerics import blockwise
from fp4jax.numerics.blockwise import Blocks


def quantize(x: jax.Array, way: Way, inputs: Inputs) -> Quantized:
    """Quantizes an array, and makes the outputs of its blocks."""
    blocks, quantizer = quantize_blocks(x, way, inputs), way.quantizer
    make = {
        Output.OPERAND: lambda: blocks.operand(jnp.bfloat16),
        Output.CODES: lambda: blocks.codes(quantizer.grid),
        Output.SCALES: lambda: blocks.scales(quantizer.scale.format),
    }
    arrays = {output: make[output]() for output in way.outputs}
    return Quantized(arrays, blocks.tensor_scale, blocks.signs)


def quantize_blocks(x: jax.Array, way: Way, inputs: Inputs) -> Blocks:
    """Quantizes an array as `numerics.blockwise` does."""
    axes = {"axis": way.axis, "other": way.other}
    return blockwise.quantize_blocks(
        x, way.quantizer, **axes, site=way.site, **vars(inputs)
    )
