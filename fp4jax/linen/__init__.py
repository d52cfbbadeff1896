"""Flax Linen: quantized products given to layers, or injected into a model."""

from fp4jax.linen.gemm import DotGeneral as DotGeneral
from fp4jax.linen.gemm import Einsum as Einsum
from fp4jax.linen.gemm import dot_general_cls as dot_general_cls
from fp4jax.linen.inject import quantize as quantize
from fp4jax.linen.state import combine_by_max as combine_by_max
from fp4jax.linen.state import value_and_grad as value_and_grad
