"""GEMMs of operands that kernels encode for FP8 are those of bfloat16."""

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp4jax
from fp4jax import recipes, sharding
from fp4jax.kernels.choice import KERNELS, Kernels
from fp4jax.kernels.quantize import INTERPRETED
from fp4jax.kernels.quantize.backends import MOSAIC
from fp4jax.ops import encoded
from tests.kernels.cases import interpreter, mosaic, several_devices
from tests.ops.test_fp8 import MATRICES, error, spread

IN_FP8 = dataclasses.replace(recipes.ti2d(), compute="fp8")
SQUARES_OF_4 = dataclasses.replace(IN_FP8.fprop.w, block=(4, 4))
OTHER = dataclasses.replace(
    IN_FP8,
    fprop=dataclasses.replace(IN_FP8.fprop, w=SQUARES_OF_4),
    dgrad=dataclasses.replace(IN_FP8.dgrad, w=SQUARES_OF_4),
)
SHAPES = ((128, 128), (128, 256), (128, 256))


def products(x, w, dy, *, weight="rhs", recipe=IN_FP8, **how):
    """All three GEMMs of a layer."""
    dot = functools.partial(fp4jax.dot_general, recipe=recipe, weight=weight, **how)
    key = jax.random.key(3)
    y, backward = jax.vjp(lambda x, w: dot(x, w, MATRICES, key=key), x, w)
    return y, *backward(dy)


def operands(binades):
    return [spread(shape, i, binades=binades) for i, shape in enumerate(SHAPES)]


def by_kernels(function, *args):
    """Calls a function whose kernels are interpreted, where no device runs them."""
    backend = INTERPRETED if interpreter() else MOSAIC
    with jax.set_mesh(sharding.make_mesh()), KERNELS(Kernels(quantize=backend)):
        return jax.jit(function)(*args)


@mosaic
@pytest.mark.parametrize("weight", ["rhs", "lhs"])
def test_equals_the_bfloat16_path(weight, monkeypatch):
    calls = []
    encode = encoded.encode
    monkeypatch.setattr(
        encoded, "encode", lambda *a, **k: calls.append(1) or encode(*a, **k)
    )
    x, w, dy = operands(10)
    step = functools.partial(products, weight=weight)
    found = by_kernels(step, x, w, dy)
    assert len(calls) == 3  # each of x, w and dy once
    plain = functools.partial(step, recipe=recipes.ti2d())
    for a, b in zip(found, jax.jit(plain)(x, w, dy), strict=True):
        assert a.dtype == b.dtype
        assert error(a, b) <= 1e-5


@mosaic
def test_powers_of_two_of_operands_cancel_where_they_can(monkeypatch):
    x, w, dy = operands(8)
    plain = jax.jit(functools.partial(products, recipe=recipes.ti2d()))
    of_nan = lambda a, b, dtype: jnp.full((len(a.array), len(b.array)), jnp.nan, dtype)
    monkeypatch.setattr(encoded.fp8, "contract", of_nan)
    patched = functools.partial(products)  # whose program no other test finds
    y, *_ = by_kernels(patched, x * 2**-9, w * 2**9, dy)
    assert error(y, plain(x * 2**-9, w * 2**9, dy)[0]) <= 1e-5
    assert np.isnan(by_kernels(patched, x * 2**-30, w, dy)[0]).all()


@mosaic
def test_a_wider_spread_takes_bfloat16():
    x, w, dy = operands(20)
    found = by_kernels(products, x, w, dy)
    plain = functools.partial(products, recipe=recipes.ti2d())
    jax.tree.map(np.testing.assert_array_equal, found, jax.jit(plain)(x, w, dy))


@mosaic
def test_a_nan_stays_in_its_rows_and_columns():
    x, w, dy = operands(2)
    y, *_ = by_kernels(products, x.at[40, 77].set(jnp.nan), w, dy)
    assert np.isnan(y[32:64]).all()
    assert np.isfinite(y[:32]).all() and np.isfinite(y[64:]).all()


@mosaic
def test_zeros_and_tiny_values():
    x, w, dy = operands(2)
    x = jnp.zeros_like(x)
    found = by_kernels(products, x, w * 1e-36, dy)
    plain = functools.partial(products, recipe=recipes.ti2d())
    expected = jax.jit(plain)(x, w * 1e-36, dy)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-5), found, expected
    )


@mosaic
def test_vmap_is_lane_by_lane():
    x, w, dy = operands(2)
    lanes = jnp.stack([x, x[::-1]])
    found = by_kernels(jax.vmap(products, in_axes=(0, None, None)), lanes, w, dy)
    for i, lane in enumerate(lanes):
        for a, b in zip(found, by_kernels(products, lane, w, dy), strict=True):
            np.testing.assert_array_equal(a[i], b)


@mosaic
@pytest.mark.parametrize(
    "change",
    [
        {"compute": "bf16"},
        {"residuals": "packed"},
        {"share_dy": False},
        {"fprop": recipes.mxfp4().fprop},
        {"fprop": OTHER.fprop, "dgrad": OTHER.dgrad},
    ],
    ids=["bf16", "packed", "not-shared", "not-square", "w-of-4"],
)
def test_others_are_quantized_as_ever(change, monkeypatch):
    monkeypatch.setattr(encoded, "encode", None)
    recipe = dataclasses.replace(IN_FP8, **change)
    by_kernels(functools.partial(products, recipe=recipe), *operands(2))


@mosaic
@pytest.mark.parametrize("m, k, n", [(0, 32, 8), (4, 0, 8), (4, 32, 0)])
def test_empty_operands(m, k, n):
    x, w = jnp.ones((m, k)), jnp.ones((k, n))
    y, dx, dw = by_kernels(products, x, w, jnp.ones((m, n)))
    assert (y.shape, dx.shape, dw.shape) == ((m, n), x.shape, w.shape)
    assert not y.any()


@mosaic
@several_devices
@pytest.mark.parametrize("devices", [None, 2])
def test_what_may_be_spread_is_quantized_as_ever(devices, monkeypatch):
    monkeypatch.setattr(encoded, "encode", None)
    mesh = devices and jax.make_mesh((devices,), ("data",))
    with KERNELS(Kernels(quantize=INTERPRETED)):
        with jax.set_mesh(mesh) if mesh else contextlib.nullcontext():
            jax.eval_shape(products, *operands(2))


@mosaic
def test_shapes_in_part_of_a_tile_are_quantized_as_ever(monkeypatch):
    monkeypatch.setattr(encoded, "encode", None)
    x, w, dy = operands(2)
    by_kernels(products, x[:60], w, dy[:60])
