"""Weights that are spread over devices: equal products, and codes on the wire."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import fp4jax
from experiments.collectives import collectives
from fp4jax import recipes, sharding
from fp4jax.ops.gather import Gather

K, N, FSDP = 128, 128, 4
GATHER = Gather(stored=P("fsdp", "tensor"), used=P(None, "tensor"))
DIMS = (((2,), (0,)), ((), ()))
ROWS = sharding.RULES["batch"]
LAYOUT = {"x": P(ROWS), "w": P("fsdp", "tensor"), "dy": P(ROWS, None, "tensor")}


def product_and_gradients(x, w, dy, *, recipe, gather):
    dot = functools.partial(
        fp4jax.dot_general,
        dimension_numbers=DIMS,
        preferred_element_type=jnp.bfloat16,
        recipe=recipe,
        key=jax.random.key(3),
        gather=gather,
    )
    y, vjp = jax.vjp(dot, x, w)
    return y, *vjp(dy)


@functools.cache
def operands():
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = {"x": (4, 32, K), "w": (K, N), "dy": (4, 32, N)}
    return {
        name: jax.random.normal(
            key, shape, jnp.float32 if name == "w" else jnp.bfloat16
        )
        for (name, shape), key in zip(shapes.items(), keys, strict=True)
    }


@functools.cache
def on_a_mesh(recipe):
    """Returns the results, and the collectives that made them."""
    with jax.set_mesh(mesh := sharding.make_mesh(fsdp=FSDP, tensor=2)):
        placed = {
            name: jax.device_put(x, NamedSharding(mesh, LAYOUT[name]))
            for name, x in operands().items()
        }
        run = functools.partial(product_and_gradients, recipe=recipe, gather=GATHER)
        program = jax.jit(run).lower(**placed).compile()
        return program(**placed), list(collectives(program.as_text()))


def bytes_gathered(recipe):
    found = on_a_mesh(recipe)[1]
    return sum(each.bytes for each in found if each.kind == "all-gather")


RECIPES = pytest.mark.parametrize(
    ("recipe", "share"),
    [
        # Codes of 4 bits, and 8 or 32 of a scale for 16 elements, or for 16 x 16.
        (recipes.ufp4(), 6 / 16),
        (recipes.mxfp4(), (4 + 8 / 32) / 16),
        (recipes.nvfp4(), (4 + 8 / 256) / 16),
    ],
    ids=["ufp4", "mxfp4", "nvfp4"],
)


@RECIPES
def test_products_and_gradients_are_those_of_one_device(recipe, share):
    run = functools.partial(product_and_gradients, recipe=recipe, gather=None)
    y, dx, dw = jax.jit(run)(**operands())
    (y_mesh, dx_mesh, dw_mesh), _ = on_a_mesh(recipe)
    np.testing.assert_array_equal(y_mesh, y)  # no sum is divided
    assert dw_mesh.sharding.spec == GATHER.stored
    # Sums over devices: 2^-8 of bfloat16, and float32's over 128 tokens.
    np.testing.assert_allclose(
        dx_mesh.astype(jnp.float32), dx.astype(jnp.float32), rtol=2**-7, atol=2**-7
    )
    np.testing.assert_allclose(dw_mesh, dw, rtol=1e-4, atol=1e-4)


@RECIPES
def test_only_codes_are_gathered(recipe, share):
    weights = 2 * K * N // 2  # bytes in bfloat16 of half of w, for fprop and dgrad
    bf16 = 2 * weights
    assert bytes_gathered(recipes.bf16()) == bf16
    assert bytes_gathered(recipe) == share * bf16
    for each in on_a_mesh(recipe)[1]:
        assert each.kind in ("all-gather", "all-reduce")
        if each.kind == "all-reduce":  # amaxes, dx over tensor, dw over fsdp
            shapes = {shape for _, shape in each.arrays}
            assert shapes <= {(), (1, 32, K), (K, N // 2)}


@pytest.mark.parametrize(
    ("w", "dims", "weight"),
    [
        ((2, K, N), (((2,), (1,)), ((0,), (0,))), "rhs"),
        ((K, 4, N), (((2,), (0,)), ((), ())), "rhs"),
        ((K, N), (((2,), (0,)), ((), ())), "lhs"),
    ],
)
def test_another_weight_than_a_matrix_raises(w, dims, weight):
    x = jnp.ones((2, 32, K), jnp.bfloat16)
    recipe = recipes.nvfp4()
    with pytest.raises(ValueError, match="gather must be None unless w is rhs"):
        fp4jax.dot_general(
            x, jnp.ones(w), dims, recipe=recipe, weight=weight, gather=GATHER
        )
