"""Each layer against its formula, and the dtypes it computes in."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import fp4jax
from fp4jax import recipes
from fp4jax.models.layers import Embed, Head, LayerNorm, Linear, RMSNorm
from tests.cases import SMALL

AXES = ("embed", "mlp")


def activations(*shape):
    return jax.random.normal(jax.random.key(1), shape).astype(jnp.bfloat16)


def test_linear_hands_the_float32_kernel_to_its_recipe():
    recipe = recipes.e2m1_ref()
    layer = Linear(32, 48, axes=AXES, recipe=recipe, rngs=nnx.Rngs(0))
    x, kernel = activations(2, 4, 32), layer.kernel[...]
    assert kernel.dtype == jnp.float32

    def product(kernel):
        dimension_numbers = (((2,), (0,)), ((), ()))
        return fp4jax.dot_general(
            x, kernel, dimension_numbers, None, jnp.bfloat16, recipe=recipe
        )

    y = layer(x)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_array_equal(y, product(kernel))
    rounded = kernel.astype(jnp.bfloat16).astype(jnp.float32)
    assert not np.array_equal(y, product(rounded))


def test_linear_starts_with_the_deviation_asked_for():
    recipe = recipes.bf16()
    layer = Linear(256, 512, axes=AXES, recipe=recipe, init_std=0.5, rngs=nnx.Rngs(0))
    # 131072 draws: the deviation of their deviation is 0.2%.
    assert np.std(layer.kernel[...]) == pytest.approx(0.5 / 16, rel=0.01)


def test_rms_norm_is_computed_in_float32():
    norm = RMSNorm(32, epsilon=1e-6, rngs=nnx.Rngs(0))
    norm.scale[...] = jnp.linspace(0.5, 2, 32)
    x = 100 * activations(3, 32)
    x64 = np.asarray(x, np.float64)
    rms = np.sqrt(np.mean(x64**2, axis=-1, keepdims=True) + 1e-6)
    y = norm(x)
    assert y.dtype == jnp.bfloat16
    expected = x64 / rms * np.linspace(0.5, 2, 32)
    # One rounding, to bfloat16 at the end.
    np.testing.assert_allclose(np.asarray(y, np.float64), expected, rtol=2**-8)


def test_layer_norm_has_no_parameters_and_is_computed_in_float32():
    norm = LayerNorm(32, epsilon=1e-6, rngs=nnx.Rngs(0))
    assert not jax.tree.leaves(nnx.state(norm))
    x = 100 + 10 * activations(3, 32)
    x64 = np.asarray(x, np.float64)
    centered = x64 - x64.mean(axis=-1, keepdims=True)
    expected = centered / np.sqrt(x64.var(axis=-1, keepdims=True) + 1e-6)
    y = norm(x)
    assert y.dtype == jnp.bfloat16
    # One rounding to bfloat16; float32 variances are off by (100 / 10)^2 2^-24.
    error = np.abs(np.asarray(y, np.float64) - expected)
    assert (error <= 2**-8 * np.abs(expected) + 2**-15).all()


def test_gradients_of_an_embedding_are_summed_in_float32():
    embed = Embed(SMALL, rngs=nnx.Rngs(0))
    tokens = jnp.zeros((1, 1000), jnp.int32)

    def total(embed):
        return jnp.sum(embed(tokens).astype(jnp.float32))

    grad = nnx.grad(total)(embed).embedding[...]
    assert grad.dtype == jnp.float32
    np.testing.assert_array_equal(grad[0], 1000)  # 256 if it were bfloat16


def test_logits_are_float32_sums_of_bfloat16_products():
    embed, x = Embed(SMALL, rngs=nnx.Rngs(0)), activations(2, 4, 32)
    table = embed.embedding[...]
    rounded = np.asarray(table.astype(jnp.bfloat16), np.float64)
    expected = np.asarray(x, np.float64) @ rounded.T
    for logits in (embed.attend(x), tied_head(table)(x)):
        assert logits.dtype == jnp.float32
        np.testing.assert_allclose(logits, expected, atol=32 * 2**-22)


@pytest.mark.parametrize("is_tied", [True, False])
def test_gradients_of_logits_are_sums_of_bfloat16_products(is_tied):
    embed, x = Embed(SMALL, rngs=nnx.Rngs(0)), activations(2, 4, 32)
    table = embed.embedding[...]
    dy = jax.random.normal(jax.random.key(2), (2, 4, 64))
    layer = embed if is_tied else tied_head(table)
    logits = Embed.attend if is_tied else Head.__call__

    @nnx.jit
    def transposed_gradients(layer, x):
        def loss(layer, x):
            return jnp.sum(dy * logits(layer, x))

        of_layer, of_x = nnx.grad(loss, argnums=(0, 1))(layer, x)
        return *(leaf.T for leaf in jax.tree.leaves(of_layer)), of_x.mT

    of_table, of_x = transposed_gradients(layer, x.astype(jnp.float32))
    of_table = of_table.T if is_tied else of_table
    x, dy, table = (
        np.asarray(a.astype(jnp.bfloat16), np.float64) for a in (x, dy, table)
    )
    assert of_table.dtype == of_x.dtype == jnp.float32
    # Sums of at most 64 float32 products, each below 8.
    np.testing.assert_allclose(of_x.mT, dy @ table, atol=64 * 2**-21)
    expected = np.einsum("btv,btd->vd", dy, x)
    np.testing.assert_allclose(of_table, expected, atol=64 * 2**-21)


def tied_head(table):
    head = Head(SMALL, rngs=nnx.Rngs(0))
    head.kernel[...] = table.T
    return head
