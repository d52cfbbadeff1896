"""Fused quantization."""

from fp4jax.kernels.quantize.api import Implementation as Implementation
from fp4jax.kernels.quantize.api import quantize as quantize
from fp4jax.kernels.quantize.api import quantize_blocks as quantize_blocks
from fp4jax.kernels.quantize.api import quantize_both as quantize_both
from fp4jax.kernels.quantize.backends import INTERPRETED as INTERPRETED
from fp4jax.kernels.quantize.backends import MOSAIC as MOSAIC
from fp4jax.kernels.quantize.backends import TRITON as TRITON
from fp4jax.kernels.quantize.backends import XLA as XLA
from fp4jax.kernels.quantize.outputs import Output as Output
from fp4jax.kernels.quantize.outputs import Quantized as Quantized
from fp4jax.kernels.quantize.way import Inputs as Inputs
from fp4jax.kernels.quantize.way import Way as Way
from fp4jax.kernels.quantize.written import Written as Written
