"""FP4 pretraining in JAX: quantizers, recipes and the GEMMs that use them."""

from fp4jax.numerics import QTensor as QTensor
from fp4jax.numerics import dequantize as dequantize
from fp4jax.numerics import fake_quant as fake_quant
from fp4jax.numerics import operand as operand
from fp4jax.numerics import quantize as quantize

__version__ = "0.1.0"
