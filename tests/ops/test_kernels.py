"""Products whose operands kernels quantize are those without, bit for bit."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import fp4jax
from fp4jax import recipes
from fp4jax.kernels import devices
from fp4jax.kernels.choice import KERNELS, Kernels
from fp4jax.kernels.quantize import INTERPRETED, MOSAIC
from tests.kernels.cases import OPAQUE, mosaic

MATRICES = (((1,), (0,)), ((), ()))
KEY = jax.random.key(0)
X = jax.random.normal(jax.random.key(1), (40, 72), jnp.bfloat16)
W = jax.random.normal(jax.random.key(2), (72, 24))
PACKED = {"residuals": "packed"}


def dot(recipe, x, w, **how):
    return fp4jax.dot_general(x, w, MATRICES, recipe=recipe, key=KEY, **how)


def step(multiply):
    """What maps x and w to their product and both gradients."""

    def loss(x, w):
        y = multiply(x, w)
        return jnp.sum(jnp.sin(y)), y

    return jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))


def count(jaxpr, name):
    """Calls of a name in a program, however deep."""
    total = 0
    for eqn in jaxpr.eqns:
        total += eqn.params.get("name") == name
        for sub in jax.tree.leaves(list(eqn.params.values()), is_leaf=is_jaxpr):
            total += count(getattr(sub, "jaxpr", sub), name) if is_jaxpr(sub) else 0
    return total


def is_jaxpr(x):
    return hasattr(x, "eqns") or hasattr(x, "jaxpr")


def check(multiply, x=X, w=W, by=OPAQUE):
    """Asserts that a backend changes no bit, and that it does the work."""
    function = step(multiply)
    expected = function(x, w)
    with KERNELS(Kernels(quantize=by)):
        found = function(x, w)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@mosaic
@pytest.mark.parametrize("name", ["ti2d", "ufp4", "nvfp4"])
def test_by_interpreted_kernels(name):
    check(functools.partial(dot, getattr(recipes, name)()), by=INTERPRETED)


@pytest.mark.parametrize(
    "recipe",
    [
        recipes.ufp4(),
        dataclasses.replace(recipes.nvfp4(), **PACKED),
        dataclasses.replace(recipes.ti2d(), compute="fp8"),
        dataclasses.replace(recipes.ue5m3(), compute="f32", **PACKED),
        recipes.mxfp8(),
        recipes.mxfp4_tseng(),
    ],
    ids=["ufp4", "nvfp4", "ti2d", "ue5m3", "mxfp8", "tseng"],
)
def test_by_a_backend_that_compilers_cannot_divide(recipe):
    check(functools.partial(dot, recipe))


@pytest.mark.parametrize("name", ["ufp4", "nvfp4"])
def test_under_vmap_scan_and_remat(name):
    recipe = getattr(recipes, name)()
    x, w = jnp.stack([X, 2 * X]), jnp.stack([W, W + 1])

    def multiply(x, w):
        lanes = jax.checkpoint(jax.vmap(functools.partial(dot, recipe)))
        return jax.lax.scan(lambda _, w: (None, lanes(x, w)), None, w[None])[1]

    check(multiply, x, w)


def grouped(name):
    """The product of rows of groups, which come from anywhere of a batch."""
    return functools.partial(
        fp4jax.ragged_dot,
        group_sizes=jnp.array([13, 0, 27], jnp.int32),
        recipe=getattr(recipes, name)(),
        key=KEY,
        positions=jax.random.permutation(KEY, 40).astype(jnp.uint32),
    )


WS = jnp.stack([W, W, -W])


@pytest.mark.parametrize("name", ["ufp4", "ti2d", "ue5m3", "nvfp4", "four_over_six"])
def test_of_groups(name):
    check(grouped(name), w=WS)


def test_of_groups_under_vmap():
    lanes = jax.vmap(grouped("nvfp4"))
    check(lanes, jnp.stack([X, 2 * X]), jnp.stack([WS, WS + 1]))


@mosaic
@pytest.mark.parametrize("name", ["ufp4", "nvfp4"])
def test_of_groups_by_interpreted_kernels(name):
    check(grouped(name), w=WS, by=INTERPRETED)


def test_held_amaxes():
    recipe = recipes.ue5m3()
    held = jnp.array([4.0, 0.0, 2.0])
    function = jax.jit(
        jax.grad(lambda held: jnp.sum(dot(recipe, X, W, held=held, step=3)))
    )
    expected = function(held)
    with KERNELS(Kernels(quantize=OPAQUE)):
        np.testing.assert_array_equal(function(held), expected)


def test_a_weight_that_is_packed_once():
    recipe = recipes.ufp4()

    def multiply(x, w):
        packed = fp4jax.ops.dot_general.pack_w(w, recipe=recipe, key=KEY)
        return dot(recipe, x, w, packed_w=packed)

    check(multiply)


PACKED_DOT = functools.partial(dot, dataclasses.replace(recipes.ufp4(), **PACKED))


@pytest.mark.parametrize("multiply, w", [(PACKED_DOT, W), (grouped("nvfp4"), WS)])
def test_a_program_names_every_quantization(multiply, w):
    function = step(multiply)
    plain = count(function.trace(X, w).jaxpr, "fp4_quantize")
    with KERNELS(Kernels(quantize=OPAQUE)):
        jaxpr = function.trace(X, w).jaxpr
    assert count(jaxpr, "fp4_quantize") == 2 * plain  # one inside of the other


@mosaic
@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)
@pytest.mark.parametrize("name", ["ufp4", "nvfp4", "ti2d"])
def test_lowers_for_gpus_of_a_mesh(name, kind, monkeypatch):
    monkeypatch.setattr(devices, "without_mosaic", lambda: None)
    recipe = dataclasses.replace(getattr(recipes, name)(), **PACKED)
    mesh = jax.make_mesh((8,), ("a",), (kind,))
    rows = NamedSharding(mesh, P("a"))
    x = jax.ShapeDtypeStruct((1024, 128), jnp.bfloat16, sharding=rows)
    w = jax.ShapeDtypeStruct((128, 256), jnp.float32, sharding=NamedSharding(mesh, P()))
    with jax.set_mesh(mesh):
        traced = jax.jit(jax.grad(lambda w, x: dot(recipe, x, w).sum())).trace(w, x)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    found = "mosaic_gpu" if kind == AxisType.Explicit else "CustomSPMDPartitioning"
    assert found in text


@mosaic
@pytest.mark.parametrize("name, kernels", [("ufp4", 6), ("nvfp4", 8)])
def test_groups_lower_for_gpus(name, kernels, monkeypatch):
    monkeypatch.setattr(devices, "without_mosaic", lambda: None)
    with KERNELS(Kernels(quantize=MOSAIC)):
        traced = step(grouped(name)).trace(X, WS)
    text = traced.lower(lowering_platforms=("cuda",)).as_text()
    assert len(re.findall(r"custom_call @mosaic_gpu\w*\(", text)) == kernels
