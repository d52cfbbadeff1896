"""Tiles that devices send to each other: which arrive where, and their gradients."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from fp4jax import sharding
from fp4jax.kernels.choice import KERNELS, Kernels
from fp4jax.kernels.exchange import DENSE, RAGGED, Ragged, exchange
from tests.kernels.ragged import ragged_all_to_all

PARTS, ROOM, TILE = 8, 5, (2, 3)
SIZES = {  # of what each device (row) sends to each (column)
    "uneven": np.random.default_rng(0).integers(0, ROOM + 1, (PARTS, PARTS)),
    "to one": np.eye(PARTS, dtype=int)[[3] * PARTS] * ROOM,
    "to none": np.zeros((PARTS, PARTS), int),
    "all": np.full((PARTS, PARTS), ROOM),
}
X, DY = (
    np.random.default_rng(i).normal(size=(PARTS, PARTS, ROOM, *TILE)) for i in (1, 2)
)


def exchanged(x, sizes):
    """What arrives, in the layout of `X`: receiver, sender, tile."""
    needed = np.arange(ROOM) < sizes[..., None]
    return np.where(needed[..., None, None], x, 0).swapaxes(0, 1)


@functools.cache
def program(parts=PARTS):
    """What arrives and the gradient, of arrays of all devices."""

    def of_device(x, sent, dy):
        received = lax.all_to_all(sent, "expert", 0, 0, tiled=True)
        send = functools.partial(exchange, sent=sent, received=received, axis="expert")
        y, vjp = jax.vjp(send, x)
        return y, *vjp(dy)

    spec = P("expert")
    return jax.jit(
        jax.shard_map(
            of_device,
            mesh=sharding.make_mesh(expert=parts),
            in_specs=(spec, spec, spec),
            out_specs=(spec, spec),
            check_vma=False,
        )
    )


def arguments(name, x=X, dy=DY):
    rows = lambda each: jnp.asarray(each, jnp.float32).reshape(-1, *TILE)
    return rows(x), jnp.asarray(SIZES[name], jnp.int32).reshape(-1), rows(dy)


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("pieces", [1, 3, 64])
def test_what_is_needed_is_sent_and_nothing_else(pieces, name, monkeypatch):
    monkeypatch.setattr(lax, "ragged_all_to_all", ragged_all_to_all)
    sizes = SIZES[name]
    needed = (np.arange(ROOM) < sizes[..., None])[..., None, None]
    x = np.where(needed, X, np.nan)
    dy = np.where(needed.swapaxes(0, 1), DY, np.nan)
    with KERNELS(Kernels(exchange=Ragged(pieces))):
        y, dx = program()(*arguments(name, x, dy))
    for found, sent, counts in ((y, X, sizes), (dx, DY, sizes.T)):
        expected = exchanged(sent, counts).reshape(found.shape)
        np.testing.assert_array_equal(found, expected.astype(np.float32))


def test_all_of_the_room_is_sent_where_there_is_no_ragged_collective():
    args, run = arguments("uneven"), program()
    y, dx = run(*args)
    for found, sent in ((y, X), (dx, DY)):
        expected = exchanged(sent, SIZES["all"]).reshape(found.shape)
        np.testing.assert_array_equal(found, expected.astype(np.float32))
    with KERNELS(Kernels(exchange=DENSE)):
        jax.tree.map(np.testing.assert_array_equal, run(*args), (y, dx))
    with KERNELS(Kernels(exchange=RAGGED)), pytest.raises(Exception, match="ragged"):
        run(*args)


def collective(how, **sizes):
    """The collective by which tiles are exchanged over a mesh of GPUs."""
    axes = {"data": 1, "expert": 1, "tensor": 1} | sizes
    types = (AxisType.Auto,) * len(axes)
    mesh = AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=types)
    parts = axes["expert"]
    x = jax.ShapeDtypeStruct((parts**2 * ROOM, *TILE), jnp.bfloat16)
    count = jax.ShapeDtypeStruct((parts**2,), jnp.int32)
    send = lambda x, n: exchange(x, sent=n, received=n, axis="expert")
    spread = jax.shard_map(
        send, mesh=mesh, in_specs=P("expert"), out_specs=P("expert"), check_vma=False
    )
    with KERNELS(Kernels(exchange=how)):
        jaxpr = str(jax.make_jaxpr(spread)(x, count))
    pieces = re.findall(r"i32\[(\d+)\]\S* = reshape", jaxpr)
    return max(map(int, pieces), default=0) if "ragged_all_to_all[" in jaxpr else None


def test_gpus_that_copy_themselves_get_many_pieces(monkeypatch):
    assert collective(None, expert=2) == collective(RAGGED, expert=8) == 512
    assert collective(None, expert=16) is None  # more than XLA's kernel serves
    assert collective(RAGGED, expert=16) == 16
    assert collective(Ragged(3), expert=16) == 48
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(jax, "local_device_count", lambda: 4)
    assert collective(None, data=4, expert=2) == collective(None, expert=2, tensor=2)
    assert collective(None, expert=2, tensor=4) is None  # whose peer is elsewhere


@pytest.mark.parametrize("pieces", [0, -1])
def test_pieces_are_a_positive_number(pieces):
    with pytest.raises(ValueError, match=f"positive .* got pieces={pieces}"):
        Ragged(pieces)


def test_a_device_alone_sends_nothing():
    x = jnp.ones((3, *TILE))
    with KERNELS(Kernels(exchange=RAGGED)):
        y, dx = program(1)(x, jnp.ones(1, jnp.int32), 2 * x)
    np.testing.assert_array_equal(y, x)
    np.testing.assert_array_equal(dx, 2 * x)


@pytest.mark.parametrize("parts", [2, 8])
def test_a_gpu_gets_ragged_collectives_in_loops_and_recomputation(parts):
    @jax.checkpoint
    def layer(x, sizes):
        sent, received = sizes
        y = exchange(x, sent=sent, received=received, axis="expert")
        return exchange(jnp.sin(y), sent=received, received=sent, axis="expert"), None

    def of_device(x, sent):
        sizes = sent, lax.all_to_all(sent, "expert", 0, 0, tiled=True)
        x, _ = lax.scan(lambda x, _: layer(x, sizes), x, length=3)
        return lax.psum(jnp.sum(x.astype(jnp.float32)), "expert")

    mesh, spec = sharding.make_mesh(expert=parts), P("expert")
    spread = jax.shard_map(
        of_device, mesh=mesh, in_specs=spec, out_specs=P(), check_vma=False
    )
    x = jax.ShapeDtypeStruct((parts**2 * ROOM, 16, 128), jnp.bfloat16)
    sent = jax.ShapeDtypeStruct((parts**2,), jnp.int32)
    text = lambda *platforms: (
        jax.jit(jax.grad(spread))
        .trace(x, sent)
        .lower(lowering_platforms=platforms)
        .as_text()
    )
    # Two forward, one of them once more, and two backward; and the sizes.
    assert text("cuda").count("ragged_all_to_all") == 5
    assert text("cpu").count("all_to_all") == 6
    assert "ragged_all_to_all" not in text("cpu")
