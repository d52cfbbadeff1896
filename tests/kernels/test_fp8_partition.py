"""Devices encode the squares of their parts as one does those of the whole."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from fp4jax.kernels import fp8
from fp4jax.kernels.choice import KERNELS, Kernels
from fp4jax.kernels.fp8 import reference
from fp4jax.kernels.partition import is_whole
from fp4jax.kernels.quantize import INTERPRETED
from fp4jax.numerics import E2M1, E8M0, Quantizer, Scale, Site, Stochastic, random_bits
from tests.kernels.cases import divisible, mosaic, several_devices

pytestmark = [mosaic, several_devices]

QUANTIZER = Quantizer(E2M1, (16, 16), Scale(E8M0), rounding=Stochastic())
COLLECTIVE = r" (all-gather|all-reduce|all-to-all|collective-permute)\("


def a_mesh(kind=AxisType.Auto):
    return jax.make_mesh((4, 2), ("a", "b"), (kind, kind))


def encoded(backend, x, axis):
    """Amaxes, and both layouts, of random bits."""
    key = jax.random.key(3)
    start = jnp.uint32(32), jnp.uint32(64)
    noise = random_bits.place(key, Site.FPROP_X.rounding_stream, start)
    powers = jax.random.randint(key, (2, x.shape[0] // 16, x.shape[1] // 16), -3, 1)
    found = fp8.encode(backend, x, QUANTIZER, 2.0**powers, axis=axis, noise=noise) + (
        fp8.amax(backend, x, 16),
    )
    return tuple(a.astype(jnp.float32) for a in found)


@pytest.mark.parametrize(
    "shape, spec, is_sent",
    [
        ((128, 96), P("a", "b"), False),
        ((128, 96), P("b"), False),
        ((64, 128), P(None, ("a", "b")), False),
        ((16, 256), P(None, ("b", "a")), False),
        ((128, 48), P("a", "b"), True),  # 48 is no 2 parts of whole squares
    ],
)
@pytest.mark.parametrize("axis", [0, 1])
def test_no_device_needs_more_than_its_part(shape, spec, is_sent, axis, monkeypatch):
    backend = divisible(monkeypatch)
    x = jax.random.normal(jax.random.key(0), shape)
    expected = jax.jit(lambda x: encoded(INTERPRETED, x, axis))(x)
    with jax.set_mesh(mesh := a_mesh()):
        layout = NamedSharding(mesh, spec)
        function = jax.jit(lambda x: encoded(backend, x, axis), in_shardings=layout)
        program = function.lower(x).compile()
        found = program(jax.device_put(x, layout))
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert bool(re.search(COLLECTIVE, program.as_text())) == is_sent


def test_kernels_are_chosen_where_a_rule_divides_them(monkeypatch):
    def chosen(backend, kind):
        with jax.set_mesh(a_mesh(kind)), KERNELS(Kernels(quantize=backend)):
            return fp8.encoder()

    backend = divisible(monkeypatch)
    assert chosen(backend, AxisType.Auto) == backend
    assert chosen(backend, AxisType.Explicit) is None
    assert chosen(INTERPRETED, AxisType.Auto) is None


def test_within_shard_map_a_part_is_whole(monkeypatch):
    backend, whole = divisible(monkeypatch), []

    def part(x):
        whole.append(is_whole(jax.sharding.get_abstract_mesh()))
        return fp8.amax(backend, x, 16)

    x = jax.random.normal(jax.random.key(0), (128, 96))
    with jax.set_mesh(a_mesh()):
        spec = P("a", "b")
        found = jax.shard_map(part, in_specs=spec, out_specs=spec)(x)
    np.testing.assert_array_equal(found, reference.amax(x, 16))
    assert whole == [True]
