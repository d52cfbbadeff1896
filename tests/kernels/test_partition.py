"""Devices quantize their parts of an array as one does the whole."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import fp4jax
from fp4jax import recipes
from fp4jax.kernels.choice import KERNELS, Kernels
from fp4jax.kernels.partition import everywhere, mesh_of, spread_of
from fp4jax.kernels.quantize import quantize, quantize_blocks, reference
from fp4jax.numerics.groups import Groups
from tests.kernels.cases import (
    FITTING,
    OPAQUE,
    QUANTIZERS,
    Opaque,
    asked,
    assert_equal,
    how,
)

AUTO, EXPLICIT = (jax.make_mesh((4, 2), ("a", "b"), (t, t)) for t in list(AxisType)[:2])
X = jax.random.normal(jax.random.key(0), (8, 256, 128))
COLLECTIVE = r" (all-gather|all-reduce|all-to-all|collective-permute)\("


@pytest.mark.parametrize(
    "spec",
    [
        P(),
        P("a"),
        P(None, "b", "a"),
        P(("a", "b")),
        P("b", None, ("a",)),
        P(("b", "a")),
    ],
    ids=str,
)
def test_a_sharding_is_read_back_in_names(spec):
    sharding = NamedSharding(AUTO, spec)
    expected = [n or () for n in (*spec, None, None, None)][:3]
    expected = [n if isinstance(n, tuple) else (n,) for n in expected]
    assert spread_of(sharding, (16, 16, 16), AUTO) == tuple(expected)


@pytest.mark.parametrize("spec", [None, P("a"), P(None, ("a", "b"))], ids=str)
def test_what_nothing_divides_is_computed_by_every_device(spec):
    x, counts = jnp.arange(64.0).reshape(8, 8), {"first": jnp.arange(8), "one": 2.0}
    product = lambda x, counts: x @ x + counts["first"][:, None] * counts["one"]
    given = x if spec is None else jax.device_put(x, NamedSharding(AUTO, spec))
    compiled = jax.jit(everywhere(product)).lower(given, counts).compile()
    assert compiled.output_shardings.is_fully_replicated
    np.testing.assert_array_equal(compiled(given, counts), product(x, counts))


def test_a_part_of_a_mesh_axis_has_no_name():
    halves = Mesh(AUTO.devices.reshape(2, 4), ("half", "rest"))
    assert spread_of(NamedSharding(halves, P("half")), (4,), AUTO) == ((),)


def test_a_mesh_is_that_of_the_devices_in_their_order():
    sharding = NamedSharding(AUTO, P("b"))
    assert mesh_of(sharding, (4,), AUTO.shape_tuple) == Mesh(AUTO.devices, ("a", "b"))
    assert mesh_of(sharding, (4,), ()).shape_tuple == (("device", 8),)


def spread_over(mesh, x, spec):
    if mesh is EXPLICIT:
        return jax.sharding.reshard(x, spec)
    return jax.lax.with_sharding_constraint(x, spec)


def compiled(mesh, name, axis, spec):
    """The quantization of a spread array, and its program's collectives."""
    quantizer = QUANTIZERS[name]

    def function(x):
        found = quantize(spread_over(mesh, x, spec), quantizer, **how(quantizer, axis))
        return found.arrays, found.tensor_scale, found.signs

    with jax.set_mesh(mesh), KERNELS(Kernels(quantize=OPAQUE)):
        program = jax.jit(function).lower(X).compile()
    return program(X), set(re.findall(COLLECTIVE, program.as_text()))


meshes = pytest.mark.parametrize("mesh", [AUTO, EXPLICIT], ids=["auto", "explicit"])


def check(mesh, name, axis, spec):
    quantizer = QUANTIZERS[name]
    (arrays, tensor_scale, signs), sent = compiled(mesh, name, axis, spec)
    expected = reference.quantize(X, *asked(quantizer, axis))
    assert_equal(reference.Quantized(arrays, tensor_scale, signs), expected)
    return sent


@meshes
@pytest.mark.parametrize(
    "name, axis, spec, sent",
    [
        ("uniform-rht-sr", 1, P("a", "b", None), set()),
        ("uniform-rht-sr", 2, P(None, "a", "b"), set()),
        ("nvfp4-rht", 1, P(None, ("a", "b"), None), {"all-reduce"}),
        ("ti2d-sr", 2, P("b", "a", None), set()),
        ("uniform-drawn-signs", 2, P(None, None, ("a", "b")), set()),
        ("nvfp4-sr-pad", 1, P(None, None, ("a", "b")), {"all-reduce"}),
        ("mxfp4-floor-sr", 1, P("b", "a"), set()),
    ],
)
def test_no_device_needs_more_than_its_part(mesh, name, axis, spec, sent):
    assert check(mesh, name, axis, spec) == sent


def of_tokens(quantizer, axis, x, tokens, groups=None):
    """What a backend makes of rows whose random bits are those of tokens."""
    way = asked(quantizer, axis, tokens=tokens, groups=groups)
    with KERNELS(Kernels(quantize=OPAQUE)):
        return quantize_blocks(x, *way).quantized.arrays


TOKENS = jax.random.bits(jax.random.key(3), X.shape[:2])


@meshes
@pytest.mark.parametrize(
    "name, axis, spec",
    [
        ("uniform-rht-sr", 1, P("a", None, "b")),
        ("uniform-rht-sr", 2, P(None, "a", "b")),
        ("ti2d-sr", 1, P("b", "a")),
    ],
)
def test_tokens_are_where_their_rows_are(mesh, name, axis, spec):
    quantizer = QUANTIZERS[name]

    def function(x, tokens):
        return of_tokens(quantizer, axis, spread_over(mesh, x, spec), tokens)

    with jax.set_mesh(mesh):
        program = jax.jit(function).lower(X, TOKENS).compile()
    expected = reference.quantize(X, *asked(quantizer, axis, tokens=TOKENS))
    jax.tree.map(np.testing.assert_array_equal, program(X, TOKENS), expected.arrays)
    assert not re.findall(COLLECTIVE, program.as_text())


@meshes
def test_entries_of_groups_have_their_scales_where_they_are(mesh):
    quantizer, spec = QUANTIZERS["nvfp4-sr-pad"], P("a", None, "b")
    groups = Groups(None, 8)
    if mesh is AUTO:
        groups = Groups(jnp.array([0, 0, 2, 1, 2, 2, 0, 1]), 3)

    @jax.jit
    def function(x, tokens, groups):
        return of_tokens(quantizer, 1, spread_over(mesh, x, spec), tokens, groups)

    further = {"tokens": TOKENS, "groups": groups}
    expected = reference.quantize(X, *asked(quantizer, 1, **further))
    with jax.set_mesh(mesh):
        found = function(X, TOKENS, groups)
    jax.tree.map(np.testing.assert_array_equal, found, expected.arrays)


@meshes
def test_lanes_have_tokens_of_their_own(mesh):
    quantizer = QUANTIZERS["mxfp4-floor-sr"]
    lane = functools.partial(of_tokens, quantizer, 1)
    x, tokens = (a.reshape(2, 4, *a.shape[1:]) for a in (X, TOKENS))

    def by_reference(x, tokens):
        return reference.quantize(x, *asked(quantizer, 1, tokens=tokens)).arrays

    lanes = list(map(by_reference, x, tokens))
    expected = jax.tree.map(lambda *of_lanes: jnp.stack(of_lanes), *lanes)
    with jax.set_mesh(mesh):
        args = jax.device_put((x, tokens), NamedSharding(mesh, P("b", "a")))
        found = jax.jit(jax.vmap(lane))(*args)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@pytest.mark.parametrize("name, axis", [("uniform-rht64", 2), ("ti2d-sr", 1)])
def test_runs_that_devices_would_cut_come_together(name, axis):
    assert check(AUTO, name, axis, P(None, None, ("a", "b"))) == {"all-gather"}


CUT = "axis 2 must be spread in whole runs of {}, got shape=.*; reshard it"


def test_explicit_axes_that_cut_rotations_are_one_sentence():
    with pytest.raises(Exception, match=CUT.format(64)):
        compiled(EXPLICIT, "uniform-rht64", 2, P(None, None, ("a", "b")))


def test_explicit_axes_that_cut_runs_are_left_to_the_compiler():
    assert check(EXPLICIT, "ti2d-sr", 1, P(None, None, ("a", "b"))) == {"all-reduce"}
    quantizer = QUANTIZERS["ti2d-sr"]
    with jax.set_mesh(EXPLICIT), pytest.raises(NotImplementedError, match="whole runs"):
        x = spread_over(EXPLICIT, X, P(None, None, ("a", "b")))
        quantize(x, quantizer, implementation="mosaic", **how(quantizer, 1))


class Unable(Opaque):
    """Kernels that must not be called."""

    def quantize(self, x, way, inputs):
        raise AssertionError(f"a kernel was called for {x}")


def test_axes_of_two_kinds_are_left_to_the_compiler():
    quantizer = QUANTIZERS["uniform-rht-sr"]

    def function(x):
        return quantize(x, quantizer, **how(quantizer, 2)).arrays

    mixed = jax.make_mesh((4, 2), ("a", "b"), (AxisType.Explicit, AxisType.Auto))
    rows = {"in_specs": P("a"), "out_specs": P("a"), "axis_names": {"a"}}
    for mesh, f in (AUTO, jax.shard_map(function, **rows)), (mixed, function):
        with jax.set_mesh(mesh), KERNELS(Kernels(quantize=Unable())):
            jax.eval_shape(f, jax.device_put(X, NamedSharding(mesh, P("a"))))


@meshes
@pytest.mark.parametrize(
    "name, in_axes, spec, sent",
    [
        ("uniform-rht-sr", (0, 0), P("a", "b"), set()),
        ("nvfp4-rht", (0, None), P("a", "b"), {"all-reduce"}),
        ("mxfp8", (0, None), P(("a", "b")), set()),
        ("uniform-rht-sr", (None, 0), P(), None),
    ],
)
def test_lanes_are_quantized_where_they_lie(mesh, name, in_axes, spec, sent):
    quantizer = QUANTIZERS[name]

    def lane(x, key):
        found = quantize(x, quantizer, **how(quantizer, 0) | {"key": key})
        return found.arrays, found.tensor_scale

    keys = jax.random.split(jax.random.key(6), 8)
    args = [a if i == 0 else a[0] for a, i in zip((X, keys), in_axes, strict=True)]
    expected = jax.vmap(lane, in_axes)(*args)
    of_keys = P("a") if in_axes[1] == 0 else P()
    args = [
        jax.device_put(a, NamedSharding(mesh, of))
        for a, of in zip(args, (spec, of_keys), strict=True)
    ]
    with jax.set_mesh(mesh), KERNELS(Kernels(quantize=OPAQUE)):
        program = jax.jit(jax.vmap(lane, in_axes)).lower(*args).compile()
    jax.tree.map(np.testing.assert_array_equal, program(*args), expected)
    found = set(re.findall(COLLECTIVE, program.as_text()))
    assert sent is None or found == sent


@meshes
def test_lanes_have_places_and_amaxes_of_their_own(mesh):
    quantizer = QUANTIZERS["nvfp4-sr-pad"]

    def lane(x, amax, row):
        given = {"amax": amax, "start": (row, jnp.uint32(0))}
        return quantize(x, quantizer, **how(quantizer, 1) | given).arrays

    args = X, jnp.arange(1.0, 9.0), 32 * jnp.arange(8, dtype=jnp.uint32)
    expected = jax.vmap(lane)(*args)
    spread = jax.device_put(args, NamedSharding(mesh, P("a")))
    with jax.set_mesh(mesh), KERNELS(Kernels(quantize=OPAQUE)):
        found = jax.jit(jax.vmap(lane))(*spread)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_lanes_of_lanes_are_those_of_one_vmap():
    quantizer = QUANTIZERS["nvfp4-sr-pad"]

    def lane(x, key):
        found = quantize(x, quantizer, **how(quantizer, 1) | {"key": key})
        return found.arrays, found.tensor_scale

    x, keys = X.reshape(2, 4, 2, 128, 128), jax.random.split(jax.random.key(6), 4)
    both = jax.vmap(jax.vmap(lane), in_axes=(0, None))
    expected = both(x, keys)
    with jax.set_mesh(EXPLICIT), KERNELS(Kernels(quantize=OPAQUE)):
        x = jax.sharding.reshard(x, P("b", "a"))
        found = jax.jit(both)(x, jax.sharding.reshard(keys, P("a")))
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@meshes
@pytest.mark.parametrize("name", ["ufp4", "nvfp4"])
@pytest.mark.parametrize(
    "x_spec, w_spec", [(P("a"), P(None, "b")), (P("a", None, "b"), P("b", "a"))]
)
def test_products_send_what_they_do_without_kernels(mesh, name, x_spec, w_spec):
    recipe, y_spec = getattr(recipes, name)(), P("a", None, "b")
    keys = jax.random.split(jax.random.key(1), 3)
    shapes = (8, 64, 128), (128, 256), (8, 64, 256)
    args = [jax.random.normal(*each) for each in zip(keys, shapes, strict=True)]
    x, w, dy = (
        jax.device_put(a, NamedSharding(mesh, spec))
        for a, spec in zip(args, (x_spec, w_spec, y_spec), strict=True)
    )

    def dot(x, w):
        return fp4jax.dot_general(
            x,
            w,
            (((2,), (0,)), ((), ())),
            recipe=recipe,
            key=jax.random.key(2),
            out_sharding=y_spec if mesh is EXPLICIT else None,
        )

    def function(x, w, dy):
        y, backward = jax.vjp(dot, x, w)
        return spread_over(mesh, y, y_spec), backward(dy)

    found, sent = [], []
    for by in (None, OPAQUE, FITTING):
        with jax.set_mesh(mesh), KERNELS(Kernels(quantize=by)):
            program = jax.jit(function).lower(x, w, dy).compile()
        found.append(program(x, w, dy))
        names = re.findall(COLLECTIVE, program.as_text())
        sent.append([name for name in names if name != "all-reduce"])
    expected, of_xla = found.pop(0), sent.pop(0)
    for each, names in zip(found, sent, strict=True):
        jax.tree.map(np.testing.assert_array_equal, each, expected)
        assert sorted(names) == sorted(of_xla)
