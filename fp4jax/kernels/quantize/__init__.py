"""Fused quantization."""

from fp4jax.kernels.quantize.api import Implementation as Implementation
from fp4jax.kernels.quantize.api import quantize as quantize
from fp4jax.kernels.quantize.outputs import Output as Output
from fp4jax.kernels.quantize.outputs import Quantized as Quantized
