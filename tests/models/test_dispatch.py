"""Tokens find their experts, on whichever device, and come back."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fp4jax import sharding
from fp4jax.kernels.choice import KERNELS, Kernels
from fp4jax.kernels.exchange import DENSE, RAGGED
from fp4jax.models.dispatch import Dispatch
from fp4jax.sharding import EXPERT, TENSOR, spec
from tests.kernels.ragged import ragged_all_to_all

ROWS, LENGTH, FEATURES, COUNT, TOP_K = 8, 12, 4, 16, 2
SHAPE = (ROWS, LENGTH, TOP_K)
RANDOM = np.random.default_rng(0)
CHOICES = {
    "uneven": RANDOM.integers(0, COUNT, SHAPE) ** 2 // COUNT,
    "one": np.zeros(SHAPE, int),
    "last": np.full(SHAPE, COUNT - 1),
    "two": RANDOM.choice([3, 12], SHAPE),
}
# Integers and few bits, whose sums are exact in any order.
X, DY = RANDOM.integers(-8, 8, (2, ROWS, LENGTH, FEATURES)).astype(np.float32)
WEIGHTS = RANDOM.integers(1, 8, SHAPE).astype(np.float32)


@functools.cache
def program(how):
    """Experts that multiply by their number, over devices, and the gradients."""

    def of_device(x, experts, weights):
        dispatch = Dispatch.of(experts, COUNT, rows=16, is_spread=True)
        groups = dispatch.groups
        device = lax.axis_index(EXPERT) * lax.axis_size(TENSOR) + lax.axis_index(TENSOR)
        number = 1 + device * groups.count + groups.of
        number = jnp.where(groups.of < groups.count, number, 0)
        tiles = dispatch.send(x, top_k=TOP_K)
        return dispatch.combine(tiles * number[:, None, None], weights)

    def run(x, experts, weights, dy):
        rows = spec("batch")
        spread = jax.shard_map(
            of_device, in_specs=(rows,) * 3, out_specs=rows, check_vma=False
        )
        call = lambda x, weights: spread(x, experts, weights)
        y, vjp = jax.vjp(call, x, weights)
        return y, *vjp(dy)

    return jax.jit(run)


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("how", [DENSE, RAGGED], ids=["dense", "ragged"])
def test_every_token_passes_the_experts_that_it_chose(how, choice, monkeypatch):
    monkeypatch.setattr(lax, "ragged_all_to_all", ragged_all_to_all)
    experts = CHOICES[choice]
    mesh = sharding.make_mesh(expert=4, tensor=2)
    with jax.set_mesh(mesh), KERNELS(Kernels(exchange=how)):
        y, dx, dw = program(how)(X, experts, WEIGHTS, DY)
    number = experts + 1
    factor = (WEIGHTS * number).sum(-1, keepdims=True)
    np.testing.assert_array_equal(y, factor * X)
    np.testing.assert_array_equal(dx, factor * DY)
    np.testing.assert_array_equal(dw, number * (X * DY).sum(-1, keepdims=True))
