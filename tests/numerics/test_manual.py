"""Arrays inside of `jax.shard_map` know along which axes they differ."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import fp4jax
from fp4jax import recipes
from fp4jax.kernels import fp8
from fp4jax.kernels.choice import KERNELS, Kernels
from fp4jax.kernels.grouped_matmul.backends import Hopper
from fp4jax.kernels.quantize import INTERPRETED, Output, quantize
from fp4jax.numerics.groups import Groups
from fp4jax.numerics.manual import varying_as
from tests.kernels.cases import mosaic, several_devices

pytestmark = several_devices
SIZES = jnp.array([5, 0, 20], jnp.int32)


def mapped(function):
    mesh = jax.make_mesh((2,), ("a",), (AxisType.Auto,), devices=jax.devices()[:2])
    specs = {"in_specs": (P("a"), P()), "out_specs": P("a")}
    return jax.shard_map(function, mesh=mesh, **specs)


def test_arrays_differ_as_any_of_them():
    def function(x, w):
        assert varying_as({"w": w}, None)["w"] is w
        assert jax.typeof(varying_as(w, x)).mat.varying == {"a"}
        return varying_as(x, w)

    jax.eval_shape(mapped(function), jnp.ones(2), jnp.ones(2))


def dot(x, w):
    how = {"recipe": recipes.mxfp8(), "key": jax.random.key(0)}
    return fp4jax.dot_general(x, w[0], (((1,), (0,)), ((), ())), **how)


def ragged_dot(x, w):
    how = {"recipe": recipes.mxfp8(), "key": jax.random.key(0)}
    return fp4jax.ragged_dot(x, w, SIZES, **how)


@pytest.mark.parametrize("product", [dot, ragged_dot])
def test_gradients_of_a_weight_that_devices_share_are_added_up(product):
    x = jax.random.normal(jax.random.key(1), (64, 32))
    w = jax.random.normal(jax.random.key(2), (3, 32, 16))

    def gradients(product):
        return jax.grad(lambda x, w: jnp.sum(product(x, w) ** 2), (0, 1))(x, w)

    in_turn = lambda x, w: jnp.concatenate(
        [product(part, w) for part in (x[:32], x[32:])]
    )
    found, expected = (
        jax.jit(gradients, static_argnums=0)(f) for f in (mapped(product), in_turn)
    )
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_devices_may_differ_in_their_noise_alone():
    x, w = jnp.ones((32, 32)), jnp.ones((1, 32, 16))
    how = {"recipe": recipes.ufp4(), "key": jax.random.key(0)}

    def by_place(x, w):
        how["microbatch"] = jax.lax.axis_index("a")
        y = fp4jax.dot_general(x, w[0], (((1,), (0,)), ((), ())), **how)
        return y + fp4jax.ragged_dot(x, w, SIZES[2:], **how)

    share = lambda _, operands: by_place(*operands)
    loss = lambda x, w: jnp.sum(mapped(share)(jnp.ones(2), (x, w)))
    found = jax.eval_shape(jax.grad(loss, (0, 1)), x, w)
    assert [each.shape for each in found] == [x.shape, w.shape]


def test_devices_that_share_held_amaxes_have_the_largest():
    x = jax.random.normal(jax.random.key(1), (64, 32)).at[40, 3].set(-9)
    w, recipe = jax.random.normal(jax.random.key(2), (32, 16)), recipes.ue5m3()

    def product(x, w, held):
        how = {"recipe": recipe, "key": jax.random.key(0), "held": held, "step": 0}
        return fp4jax.dot_general(x, w, (((1,), (0,)), ((), ())), **how)

    def loss(held):
        share = lambda x, state: product(x, *state)
        return jnp.sum(jnp.arange(-7.0, 57)[:, None] * mapped(share)(x, (w, held)))

    state = jax.jit(jax.grad(loss))(jnp.zeros(3))
    np.testing.assert_array_equal(state, [9, jnp.max(jnp.abs(w)), 56])


def test_groups_that_devices_share_have_the_largest_of_their_rows():
    x, w = jnp.ones((64, 32)).at[2].set(3).at[34].set(-5), jnp.ones((3, 32, 16))
    sizes = jnp.array([[0, 8, 0], [1, 3, 0]], jnp.int32)

    def product(x, operands):
        sizes = operands[0][jax.lax.axis_index("a")]
        how = {"recipe": recipes.ue5m3(), "key": jax.random.key(0), "step": 0}
        return fp4jax.ragged_dot(x, w, sizes, held=operands[1], **how)

    loss = lambda held: jnp.sum(2 * mapped(product)(x, (sizes, held)))
    state = jax.jit(jax.grad(loss))(jnp.zeros((3, 3)))
    np.testing.assert_array_equal(state, [[1, 1, 2], [5, 1, 2], [0, 1, 0]])


def quantized(x):
    how = {"outputs": [Output.CODES], "axis": 1}
    return quantize(x, recipes.ufp4().fprop.x, **how).arrays[Output.CODES]


def multiplied(x):
    kernels, groups = Hopper(interpreted=True), Groups(jnp.zeros(8, jnp.int32), 1)
    w = jnp.ones((1, 128, 128), jnp.bfloat16)
    return kernels.rows(x.reshape(8, 16, 128), w, groups, axis=1, dtype=x.dtype)


def measured(x):
    return fp8.amax(INTERPRETED, x, 32)


@mosaic
@pytest.mark.parametrize("kernel", [quantized, multiplied, measured])
def test_what_a_kernel_writes_differs_as_what_it_reads(kernel):
    def function(x, w):
        assert jax.typeof(kernel(x)).mat.varying == {"a"}
        return x

    x = jnp.ones((256, 128), jnp.bfloat16)
    with KERNELS(Kernels(quantize=INTERPRETED)):
        jax.eval_shape(mapped(function), x, x)
