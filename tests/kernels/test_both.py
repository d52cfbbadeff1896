"""Several quantizations from one read are what each is by itself."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from fp4jax import recipes
from fp4jax.kernels.quantize import (
    INTERPRETED,
    MOSAIC,
    Inputs,
    Output,
    Quantized,
    Way,
    call,
    reference,
)
from fp4jax.kernels.quantize.matrix import Prepared
from fp4jax.numerics import Site
from tests.kernels.cases import (
    FITTING,
    OPAQUE,
    QUANTIZERS,
    RUNNING,
    assert_equal,
    interpreter,
    mosaic,
    on_cpu,
    parts,
    several_devices,
    tensor,
)

KEY = jax.random.key(5)
COLLECTIVE = r" (all-gather|all-reduce|all-to-all|collective-permute)\("
meshes = pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit], ids=str)


def ways(name, ndim=2, key=KEY):
    """How a recipe quantizes dy, whose rows are tokens, for both products."""
    sites = getattr(recipes, name)().sites
    row, first = jnp.uint32(64), jnp.uint32(0)
    return [
        (
            Way(sites[site], tuple(Output), axis % ndim, site=site),
            Inputs(key=key, start=start),
        )
        for site, axis, start in (
            (Site.DGRAD_DY, -1, (row, first)),
            (Site.WGRAD_DY, -2, (first, row)),
        )
    ]


def of_both(x, ways, backend):
    """Both quantizations as one operation."""
    return list(map(parts, call.quantize_both(x, ways, backend)))


def of_each(x, ways):
    return [parts(reference.quantize(x, *way)) for way in ways]


def kernels(function, *args):
    """How many kernels a traced program has."""
    return str(jax.jit(function).trace(*args).jaxpr).count("grid_names=")


def check(backend, x, name):
    """Compares what a backend makes of an array for both products with references."""
    both = []
    for way, of in ways(name, x.ndim):
        amax = None if way.quantizer.tensor_scale is None else jnp.float32(8)
        both.append((way, dataclasses.replace(of, amax=amax)))

    def call(x):
        return list(map(parts, backend.quantize_all(x, both)))

    found = (call if backend == INTERPRETED else jax.jit(call))(x)
    for of, way in zip(found, both, strict=True):
        expected = on_cpu(lambda x, way=way: reference.quantize(x, *way), x)
        assert_equal(Quantized(*of), expected)


@mosaic
@pytest.mark.parametrize("name", ["ufp4", "nvfp4", "mxfp4"])
@pytest.mark.parametrize("shape", [(64, 256), (2, 64, 128)], ids=str)
def test_one_kernel_equals_the_reference_of_each(name, shape):
    check(RUNNING, tensor(shape, jnp.bfloat16), name)


@mosaic
@pytest.mark.parametrize(
    "shape, count", [((64, 256), 1), ((2, 64, 128), 1), ((48, 80), 2)], ids=str
)
def test_what_wants_padding_is_read_twice(shape, count):
    both = ways("ufp4", len(shape))
    x = jax.ShapeDtypeStruct(shape, jnp.float32)
    assert kernels(lambda x: of_both(x, both, MOSAIC), x) == count


@mosaic
def test_runs_and_widths_may_differ():
    from fp4jax.kernels.quantize import mosaic
    from fp4jax.kernels.quantize.task import Task, perform

    x, interpret = tensor((64, 256), jnp.bfloat16), interpreter()
    tasks = []
    for name, axis, width in (("uniform-rht64", 1, 1), ("uniform", 0, 2)):
        quantizer = QUANTIZERS[name]
        prepared = Prepared.of(x, Way(quantizer, (), axis), Inputs())
        how = {"width": width, "interpret": interpret is not None}
        tiles = mosaic.geometry_of(prepared.view, quantizer, **how)
        tasks.append(Task(tiles, quantizer, tuple(Output), prepared.scalars))
    assert [task.geometry.programs for task in tasks] == [2, 4]
    found = perform(tasks, x, interpret=interpret)
    for task, arrays in zip(tasks, found, strict=True):
        (expected,) = perform([task], x, interpret=interpret)
        jax.tree.map(np.testing.assert_array_equal, arrays, expected)


@mosaic
def test_both_lower_for_cuda():
    both, x = ways("ufp4"), jax.ShapeDtypeStruct((64, 256), jnp.bfloat16)
    lowered = (
        jax.jit(lambda x: of_both(x, both, MOSAIC))
        .trace(x)
        .lower(lowering_platforms=("cuda",))
    )
    assert lowered.as_text().count("@mosaic_gpu") == 1


@pytest.mark.parametrize(
    "name, axes, backend",
    [
        ("ufp4", (0, 0), FITTING),
        ("ufp4", (None, 0), FITTING),
        ("ue5m3", (0, None), FITTING),
        ("nvfp4", (0, 0), OPAQUE),
    ],
)
def test_lanes_are_those_of_each(name, axes, backend):
    x = tensor((3, 32, 64), jnp.float32)
    keys = jax.random.split(jax.random.key(1), 3)

    def lane(x, key):
        both = ways(name, key=key)
        return of_both(x, both, backend), of_each(x, both)

    args = [a if axis == 0 else a[0] for a, axis in zip((x, keys), axes, strict=True)]
    found, expected = jax.jit(jax.vmap(lane, axes))(*args)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


@several_devices
@meshes
@pytest.mark.parametrize(
    "name, spec, sent",
    [
        ("ufp4", P("a", None, "b"), set()),
        ("ufp4", P(None, ("a", "b"), None), set()),
        ("nvfp4", P(None, "a", "b"), {"all-reduce"}),
    ],
)
def test_devices_quantize_their_parts_both_ways(name, spec, sent, kind):
    x = jax.random.normal(jax.random.key(0), (8, 256, 128))
    both = ways(name, ndim=3)
    mesh = jax.make_mesh((4, 2), ("a", "b"), (kind, kind))
    expected = of_each(x, both)
    spread = jax.device_put(x, NamedSharding(mesh, spec))
    with jax.set_mesh(mesh):
        program = jax.jit(lambda x: of_both(x, both, FITTING)).lower(spread)
        program = program.compile()
    jax.tree.map(np.testing.assert_array_equal, program(spread), expected)
    assert set(re.findall(COLLECTIVE, program.as_text())) == sent
