"""GEMMs of operands that kernels encode for FP8, of arrays on several devices."""

import functools
import math

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import fp4jax
from experiments.collectives import collectives
from fp4jax import recipes, sharding
from fp4jax.kernels.choice import KERNELS, Kernels
from fp4jax.ops import encoded, squares
from fp4jax.ops.gather import Gather
from tests.kernels.cases import divisible, mosaic, several_devices
from tests.ops.test_encoded import IN_FP8
from tests.ops.test_fp8 import MATRICES, error, spread

pytestmark = [mosaic, several_devices]

M, K, N = 256, 128, 256
ROWS = P(("data", "fsdp"))
LAYOUTS = {
    "whole": (P(None, "tensor"), None),
    "gathered": (
        P("fsdp", "tensor"),
        Gather(stored=P("fsdp", "tensor"), used=P(None, "tensor")),
    ),
}


def products(x, w, dy, *, recipe=IN_FP8, gather=None, packed=False):
    """All three GEMMs of a layer whose result is bfloat16."""
    key = jax.random.key(3)
    packed_w = fp4jax.pack_w(w, recipe=recipe) if packed else None
    dot = functools.partial(
        fp4jax.dot_general,
        dimension_numbers=MATRICES,
        recipe=recipe,
        key=key,
        gather=gather,
        packed_w=packed_w,
    )
    y, backward = jax.vjp(lambda x, w: dot(x, w), x, w)
    return y, *backward(dy.astype(y.dtype))


def operands():
    shapes = (M, K), (K, N), (M, N)
    return [spread(shape, i, binades=10) for i, shape in enumerate(shapes)]


def on_a_mesh(monkeypatch, layout, **how):
    """Returns the results and the collectives that made them, and what was encoded."""
    seen, encode = [], squares.encode
    monkeypatch.setattr(
        encoded,
        "encode",
        lambda of, *a, **how: seen.append(type(of)) or encode(of, *a, **how),
    )
    of_w, gather = LAYOUTS[layout]
    mesh = sharding.make_mesh(data=2, fsdp=2, tensor=2)
    function = functools.partial(products, gather=gather, **how)
    kernels = Kernels(quantize=divisible(monkeypatch))
    with jax.set_mesh(mesh), KERNELS(kernels):
        placed = [
            jax.device_put(x, NamedSharding(mesh, spec))
            for x, spec in zip(
                operands(), (ROWS, of_w, P(*ROWS, "tensor")), strict=True
            )
        ]
        program = jax.jit(function).lower(*placed).compile()
        return program(*placed), list(collectives(program.as_text())), seen


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_equals_the_bfloat16_path_of_one_device(layout, packed, monkeypatch):
    found, sent, seen = on_a_mesh(monkeypatch, layout, packed=packed)
    plain = functools.partial(products, recipe=recipes.ti2d())
    for a, b in zip(found, jax.jit(plain)(*operands()), strict=True):
        assert a.dtype == b.dtype
        assert error(a, b) <= 1e-5
    is_array = packed or layout == "gathered"
    assert seen.count(squares.OfCodes) == (2 if is_array else 0)
    assert seen.count(squares.OfArray) == (2 if is_array else 3)
    for each in sent:  # codes of w, what rows of squares have in common, and sums
        assert each.kind in ("all-gather", "all-reduce")
        if each.kind == "all-gather":
            assert layout == "gathered"
            for dtype, shape in each.arrays:
                assert dtype == "u8" or math.prod(shape) <= K // 32 * N // 32


def test_a_packed_weight_changes_no_bit(monkeypatch):
    kernels = Kernels(quantize=divisible(monkeypatch))
    with jax.set_mesh(sharding.make_mesh()), KERNELS(kernels):
        found, expected = (
            jax.jit(functools.partial(products, packed=packed))(*operands())
            for packed in (True, False)
        )
    jax.tree.map(np.testing.assert_array_equal, found, expected)
