"""Backward passes that multiply by what was packed, as kernels take it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp4jax
from fp4jax import recipes
from fp4jax.kernels import devices
from fp4jax.kernels.choice import KERNELS, Kernels
from fp4jax.kernels.scaled_matmul import api
from fp4jax.kernels.scaled_matmul.backends import Mosaic, Xla
from fp4jax.kernels.tile import Tile
from fp4jax.ops.dot_general import pack_w
from tests.kernels.cases import mosaic

PACKED = {"residuals": "packed"}
MATRICES = (((2,), (0,)), ((), ()))
KEY = jax.random.key(0)


@dataclasses.dataclass(frozen=True)
class Noted(Xla):
    """The reference, and what it was asked for."""

    calls: list = dataclasses.field(default_factory=list, hash=False)

    def multiply(self, packed, other, *, axis, side, **how):
        self.calls.append((packed.tiling.shape, packed.axis, other.shape, axis, side))
        return super().multiply(packed, other, axis=axis, side=side, **how)


def integers(seed, shape):
    """Values of which each block has one size, so that all sums are exact."""
    return jax.random.randint(jax.random.key(seed), shape, -3, 4).astype(jnp.bfloat16)


X, W, DY = integers(1, (2, 64, 128)), integers(2, (128, 128)), integers(3, (2, 64, 128))


def gradients(recipe, *, once=False):
    """Those of x and w, w packed by itself or not."""

    def loss(x, w):
        packed_w = pack_w(w, recipe=recipe, key=KEY) if once else None
        how = {"recipe": recipe, "key": KEY, "packed_w": packed_w}
        return jnp.sum(DY * fp4jax.dot_general(x, w, MATRICES, **how))

    return jax.jit(jax.grad(loss, argnums=(0, 1)))(X, W)


def check(recipe, backend, **how):
    """Asserts that a backend changes no bit."""
    expected = gradients(recipe, **how)
    with KERNELS(Kernels(scaled_matmul=backend)):
        found = gradients(recipe, **how)
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("name", ["ue5m3", "ti2d", "mxfp4"])
def test_the_chosen_one_multiplies_by_packed_x(name):
    backend = Noted()
    check(dataclasses.replace(getattr(recipes, name)(), **PACKED), backend)
    assert backend.calls == [((128, 128), 0, (128, 128), 0, "lhs")]


def test_and_by_a_packed_weight():
    backend = Noted()
    check(recipes.ue5m3(), backend, once=True)
    assert backend.calls == [
        ((128, 128), 0, (128, 128), 1, "rhs"),
        ((128, 128), 1, (128, 128), 1, "rhs"),
    ]


@pytest.mark.parametrize("change", [{"compute": "f32"}, {"residuals": "operands"}])
def test_nothing_else_is_left_to_it(change):
    backend = Noted()
    recipe = dataclasses.replace(recipes.ue5m3(), **(PACKED | change))
    with KERNELS(Kernels(scaled_matmul=backend)):
        jax.eval_shape(lambda: gradients(recipe))
    assert not backend.calls


@mosaic
@pytest.mark.parametrize("name", ["mxfp4", "ti2d"])
def test_kernels_change_no_bit(name, monkeypatch):
    monkeypatch.setattr(api, "_say", pytest.fail)  # nothing is left to XLA
    recipe = dataclasses.replace(getattr(recipes, name)(), **PACKED)
    backend = Mosaic(bool(devices.without_wgmma()), Tile(n=64, stages=2))
    check(recipe, backend, once=True)
