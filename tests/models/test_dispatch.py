"""Tokens find their experts, on whichever device, and come back."""

import functools
import itertools
import math

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
EXPERTS, TENSORS, TILE = 4, 2, 2  # of the mesh, and rows of a tile
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
def program(factor):
    """Experts that multiply by their number, over devices, and the gradients."""

    def of_device(x, experts, weights):
        dispatch = Dispatch.of(
            experts, COUNT, rows=TILE, is_spread=True, capacity_factor=factor
        )
        groups = dispatch.groups
        device = lax.axis_index(EXPERT) * lax.axis_size(TENSOR) + lax.axis_index(TENSOR)
        number = 1 + device * groups.count + groups.of
        number = jnp.where(groups.of < groups.count, number, 0)
        tiles = dispatch.send(x, top_k=TOP_K)
        y = dispatch.combine(tiles * number[:, None, None], weights)
        return y, dispatch.dropped

    def run(x, experts, weights, dy):
        rows = spec("batch")
        spread = jax.shard_map(
            of_device, in_specs=(rows,) * 3, out_specs=rows, check_vma=False
        )
        call = lambda x, weights: spread(x, experts, weights)
        y, vjp, dropped = jax.vjp(call, x, weights, has_aux=True)
        return y, *vjp(dy), dropped

    return jax.jit(run)


def check(how, experts, kept, factor=0.0):
    mesh = sharding.make_mesh(expert=EXPERTS, tensor=TENSORS)
    with jax.set_mesh(mesh), KERNELS(Kernels(exchange=how)):
        y, dx, dw, dropped = program(factor)(X, experts, WEIGHTS, DY)
    number = (experts + 1) * kept
    total = (WEIGHTS * number).sum(-1, keepdims=True)
    np.testing.assert_array_equal(y, total * X)
    np.testing.assert_array_equal(dx, total * DY)
    np.testing.assert_array_equal(dw, number * (X * DY).sum(-1, keepdims=True))
    np.testing.assert_array_equal(dropped, (~kept).sum((1, 2)))


def with_room(experts, factor):
    """Which choices have room, of tiles filled one after another."""
    kept, rows = np.zeros(SHAPE, bool), ROWS // EXPERTS
    here = COUNT // (EXPERTS * TENSORS)
    share = math.ceil(factor * rows * LENGTH * TOP_K / (EXPERTS * TENSORS))
    room = (share + rows * here * (TILE - 1)) // TILE
    for sender, device in itertools.product(range(EXPERTS), range(EXPERTS * TENSORS)):
        used = 0
        for expert, row in itertools.product(range(here), range(rows)):
            row += rows * sender
            chosen = np.argwhere(experts[row] == device * here + expert)
            for i, (token, choice) in enumerate(chosen):
                kept[row, token, choice] = used + i // TILE < room
            used += -(-len(chosen) // TILE)
    return kept


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("how", [DENSE, RAGGED], ids=["dense", "ragged"])
def test_every_token_passes_the_experts_that_it_chose(how, choice, monkeypatch):
    monkeypatch.setattr(lax, "ragged_all_to_all", ragged_all_to_all)
    check(how, CHOICES[choice], np.ones(SHAPE, bool))


@pytest.mark.parametrize("choice", CHOICES)
def test_what_a_device_has_no_room_for_is_dropped_and_counted(choice, monkeypatch):
    monkeypatch.setattr(lax, "ragged_all_to_all", ragged_all_to_all)
    experts = CHOICES[choice]
    kept = with_room(experts, 1.25)
    assert 0.1 < kept.mean() < 0.95
    check(RAGGED, experts, kept, factor=1.25)
