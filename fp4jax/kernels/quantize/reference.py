"""Fused quantization by the reference: what every backend must equal."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from fp4jax.kernels.quantize.outputs import Output, Quantized
from fp4jax.numerics import Quantizer
from fp4jax.numerics.blockwise import quantize_blocks


def quantize(
    x: jax.Array, quantizer: Quantizer, *, outputs: Sequence[Output], **how: Any
) -> Quantized:
    """Quantizes an array; the further arguments are those of `quantize_blocks`."""
    blocks = quantize_blocks(x, quantizer, **how)
    make = {
        Output.OPERAND: lambda: blocks.operand(jnp.bfloat16),
        Output.CODES: lambda: blocks.codes(quantizer.grid),
        Output.SCALES: lambda: blocks.scales(quantizer.scale.format),
    }
    arrays = {output: make[output]() for output in outputs}
    return Quantized(arrays, blocks.tensor_scale, blocks.signs)
