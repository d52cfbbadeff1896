"""Flax NNX: quantized layers, a call that injects them, and the state they hold."""

from fp4jax.nnx.gemm import DotGeneral as DotGeneral
from fp4jax.nnx.gemm import Einsum as Einsum
from fp4jax.nnx.gemm import Gemm as Gemm
from fp4jax.nnx.gemm import Held as Held
from fp4jax.nnx.gemm import Microbatch as Microbatch
from fp4jax.nnx.gemm import NoiseKey as NoiseKey
from fp4jax.nnx.gemm import QuantizedWeight as QuantizedWeight
from fp4jax.nnx.gemm import QuantStep as QuantStep
from fp4jax.nnx.grad import value_and_grad as value_and_grad
from fp4jax.nnx.grouped import GroupedLinear as GroupedLinear
from fp4jax.nnx.grouped import RaggedDot as RaggedDot
from fp4jax.nnx.inject import layers as layers
from fp4jax.nnx.inject import quantize_model as quantize_model
from fp4jax.nnx.step import set_step as set_step
from fp4jax.nnx.weights import quantize_weights as quantize_weights
