"""The MLPs against their formulas."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fp4jax import recipes
from fp4jax.models.mlp import SquaredReLU, SwiGLU
from tests.cases import SMALL

BF16 = {f"mlp/{site}": recipes.bf16() for site in ("gate", "up", "down")}


def activations(*shape):
    return jax.random.normal(jax.random.key(1), shape).astype(jnp.bfloat16)


def test_swiglu_equals_its_formula():
    layer = SwiGLU(SMALL, BF16, rngs=nnx.Rngs(0))
    x = activations(2, 4, 32)
    gate, up = (linear(x).astype(jnp.float32) for linear in (layer.gate, layer.up))
    hidden = gate / (1 + jnp.exp(-gate)) * up
    expected = hidden @ layer.down.kernel[...]
    # The hidden activations are rounded thrice to bfloat16, then the result is.
    np.testing.assert_allclose(layer(x).astype(jnp.float32), expected, atol=2**-6)


def test_squared_relu_equals_its_formula():
    layer = SquaredReLU(SMALL, BF16, rngs=nnx.Rngs(0))
    x = activations(2, 4, 32)
    hidden = np.maximum(np.asarray(layer.up(x), np.float64), 0) ** 2
    expected = hidden @ np.asarray(layer.down.kernel[...], np.float64)
    # The hidden activations, up to 16, are rounded to bfloat16, then the result is.
    np.testing.assert_allclose(np.asarray(layer(x), np.float64), expected, atol=2**-5)
