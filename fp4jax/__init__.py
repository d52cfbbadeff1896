"""FP4 pretraining in JAX: quantizers, recipes and the GEMMs that use them."""

from fp4jax import policies as policies
from fp4jax import recipes as recipes
from fp4jax.explanation import Explanation as Explanation
from fp4jax.explanation import explain as explain
from fp4jax.numerics import QTensor as QTensor
from fp4jax.numerics import dequantize as dequantize
from fp4jax.numerics import fake_quant as fake_quant
from fp4jax.numerics import operand as operand
from fp4jax.numerics import quantize as quantize
from fp4jax.numerics import stats as stats
from fp4jax.ops.dot_general import dot_general as dot_general
from fp4jax.ops.dot_general import pack_w as pack_w
from fp4jax.ops.dot_general import pack_x as pack_x
from fp4jax.ops.einsum import einsum as einsum
from fp4jax.ops.ragged_dot import ragged_dot as ragged_dot
from fp4jax.summary import summarize as summarize
from fp4jax.taps import Operands as Operands
from fp4jax.taps import capture as capture

__version__ = "0.1.0"
