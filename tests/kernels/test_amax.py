"""The amaxes of groups of rows, by kernels that rotate what they read."""

import dataclasses
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from fp4jax.kernels.choice import KERNELS, Kernels
from fp4jax.kernels.quantize import INTERPRETED, call, quantize_blocks
from fp4jax.kernels.quantize.backends import rotated
from fp4jax.numerics import Hadamard, exact
from fp4jax.numerics.groups import Groups
from fp4jax.numerics.hadamard import PerStepSigns
from tests.kernels.cases import (
    OPAQUE,
    QUANTIZERS,
    RUNNING,
    asked,
    backends,
    mosaic,
    on_cpu,
    several_devices,
    tensor,
)

NVFP4 = QUANTIZERS["nvfp4-rht"]
ROTATED = {
    "nvfp4-rht": NVFP4,
    "rht64": dataclasses.replace(NVFP4, rotation=Hadamard(64)),
    "drawn-signs": dataclasses.replace(NVFP4, rotation=Hadamard(16, PerStepSigns())),
}
KEYS = jax.random.split(jax.random.key(9), 2)
# The second has no entries, and two entries are of none.
GROUPS = Groups(jnp.array([2, 0, 4, 3, 0, 4, 2, 3], jnp.int32), 4)
INF = float("inf")


def amax_of(x, quantizer, key=KEYS[0], groups=GROUPS, axis=1):
    """The tensor scales of a quantization, which show the amaxes, and its codes."""
    how = {"key": key, "groups": groups, "start": None}
    found = quantize_blocks(x, *asked(quantizer, axis, **how))
    return found.tensor_scale, found.codes(quantizer.grid)


def check(function, *args, by):
    """Asserts that a backend changes no bit."""
    expected = jax.jit(function)(*args)
    with KERNELS(Kernels(quantize=by)):
        found = function(*args) if by == INTERPRETED else jax.jit(function)(*args)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    return found


def check_entries(backend, shape, dtype, name):
    """Compares the amaxes of entries, the first five special, with the reference."""
    entries = len(shape) - 2
    x = tensor((math.prod(shape[:-2]), *shape[-2:]), dtype)
    x = x * 2.0 ** (jnp.arange(x.shape[0]) % 8)[:, None, None].astype(dtype)
    x = x.at[1].set(0).at[2, 7, 5].set(jnp.nan).at[3, 15, 100].set(INF)
    x = x.at[4, 8:10, 64].set(jnp.array([INF, -INF], dtype)).reshape(shape)
    way, _ = asked(ROTATED[name], entries)
    found = backend.amax(x, way, KEYS[0], entries)
    assert found.shape == shape[:-2]

    def largest(x):
        bits = exact.magnitude_bits_of(rotated(x, way, KEYS[0]))
        return exact.float_of(jnp.max(bits, (-2, -1)))

    np.testing.assert_array_equal(found, on_cpu(largest, x))
    assert np.isnan(found).sum() == 2 and np.isinf(found).sum() == 1


@pytest.mark.filterwarnings("ignore:invalid value")  # of infinities, by NumPy
@backends
@pytest.mark.parametrize("name", ROTATED)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("shape", [(6, 64, 128), (2, 3, 128, 256)], ids=str)
def test_entries_have_amaxes_of_their_own(shape, dtype, name, backend):
    check_entries(backend, shape, dtype, name)


@backends
@pytest.mark.parametrize("name", ROTATED)
def test_groups_have_amaxes_of_their_entries(name, backend):
    x = tensor((8, 64, 128), jnp.bfloat16)
    x = x.at[2].mul(1024).at[3, 7, 9].set(jnp.nan)  # of none; of the last group
    scales = lambda x: amax_of(x, ROTATED[name])[:1]  # codes of NaNs may differ
    (scale,) = check(scales, x, by=backend)
    of = GROUPS.of
    assert jnp.isnan(scale[of == 3]).all() and jnp.isfinite(scale[of < 3]).all()


@mosaic
def test_shapes_are_padded_to_what_the_kernel_takes():
    x = tensor((8, 40, 72), jnp.bfloat16)
    check(lambda x: amax_of(x, NVFP4), x, by=RUNNING)


@pytest.mark.parametrize(
    "name, in_axes", [("nvfp4-rht", (0, None)), ("drawn-signs", (0, 0))]
)
@pytest.mark.parametrize(
    "by", [OPAQUE, pytest.param(RUNNING, marks=mosaic)], ids=["opaque", "mosaic"]
)
def test_lanes_have_groups_of_their_own(by, name, in_axes):
    x = tensor((8, 32, 128), jnp.bfloat16)
    x, keys = jnp.stack([x, 3 * x[::-1]]), KEYS if in_axes[1] == 0 else KEYS[0]
    lanes = jax.vmap(lambda x, key: amax_of(x, ROTATED[name], key), in_axes)
    check(lanes, x, keys, by=by)


def test_lanes_of_lanes_are_those_of_one_vmap():
    x = tensor((2, 2, 8, 32, 128), jnp.bfloat16)
    lane = lambda x, key: amax_of(x, ROTATED["drawn-signs"], key)
    check(jax.vmap(jax.vmap(lane), (0, None)), x, KEYS, by=OPAQUE)


@several_devices
@pytest.mark.parametrize("kind", list(AxisType)[:2], ids=["auto", "explicit"])
@pytest.mark.parametrize(
    "spec, sent",
    [
        (P("a"), set()),
        (P("a", None, "b"), {"all-reduce"}),
        (P(None, ("a", "b")), {"all-reduce"}),
    ],
    ids=str,
)
def test_devices_take_the_amaxes_of_their_parts(kind, spec, sent):
    mesh = jax.make_mesh((4, 2), ("a", "b"), (kind, kind))
    x = jax.random.normal(jax.random.key(0), (8, 256, 128))
    sharding = NamedSharding(mesh, spec)
    expected = amax_of(x, NVFP4, groups=Groups(None, 8))
    with jax.set_mesh(mesh), KERNELS(Kernels(quantize=OPAQUE)):
        each = jax.jit(lambda x: amax_of(x, NVFP4, groups=Groups(None, 8)))
        program = each.lower(jax.device_put(x, sharding)).compile()
        found = program(jax.device_put(x, sharding))
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    names = r" (all-gather|all-reduce|all-to-all|collective-permute)\("
    assert set(re.findall(names, program.as_text())) == sent


@several_devices
def test_groups_of_a_mesh_have_amaxes_of_all_devices():
    mesh = jax.make_mesh((4, 2), ("a", "b"), (AxisType.Auto, AxisType.Auto))
    x = jax.random.normal(jax.random.key(0), (8, 256, 128))
    expected = amax_of(x, NVFP4)
    with jax.set_mesh(mesh), KERNELS(Kernels(quantize=OPAQUE)):
        x = jax.device_put(x, NamedSharding(mesh, P("a", None, "b")))
        found = jax.jit(lambda x: amax_of(x, NVFP4))(x)
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_tiles_that_two_entries_may_share_are_left_to_xla(caplog):
    call._say.cache_clear()
    x = tensor((8, 32, 128), jnp.bfloat16)
    with caplog.at_level("INFO"):
        check(lambda x: amax_of(x, NVFP4, axis=2), x, by=OPAQUE)
    assert "of a rotated copy in XLA: tiles of runs along the last" in caplog.text
