"""Sign vectors and rotations: who shares them, and how far a NaN spreads."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from fp4jax.numerics import (
    NVFP4_SIGNS,
    FixedSigns,
    Hadamard,
    PerStepSigns,
    Site,
    hadamard,
)
from tests.numerics.cases import KEY, normal

rotate = jax.jit(hadamard.rotate, static_argnums=2)
rotate_back = jax.jit(hadamard.rotate_back, static_argnums=2)
sign_vector = jax.jit(hadamard.sign_vector, static_argnums=(0, 2))
OTHER_KEY = jax.random.key(1)


def signs(spec, key=None, site=Site.FPROP_X, size=32):
    eps = sign_vector(Hadamard(size, spec), key, site.signs_stream)
    assert eps.shape == (size,) and eps.dtype == jnp.float32
    assert set(np.unique(eps)) == {-1, 1}
    return eps.tolist()


def test_explicit_signs_are_taken_as_they_are():
    assert signs(NVFP4_SIGNS, size=16) == list(NVFP4_SIGNS)


def test_fixed_signs_depend_on_the_seed_alone():
    fixed = signs(FixedSigns(5))
    assert fixed == signs(FixedSigns(5), KEY) == signs(FixedSigns(5), site=Site.WGRAD_X)
    assert signs(FixedSigns(6)) != fixed != signs(FixedSigns(2**32 - 1))


def test_drawn_signs_are_shared_by_a_gemm_and_by_nothing_else():
    drawn = {site: signs(PerStepSigns(), KEY, site) for site in Site}
    assert drawn[Site.DGRAD_DY] == drawn[Site.DGRAD_W]
    gemms = [drawn[Site.FPROP_X], drawn[Site.DGRAD_DY], drawn[Site.WGRAD_DY]]
    assert all(gemms.count(vector) == 1 for vector in gemms)
    assert signs(PerStepSigns(), OTHER_KEY) != drawn[Site.FPROP_X]


def test_a_shorter_vector_is_the_start_of_a_longer_one():
    assert signs(FixedSigns(5), size=8) == signs(FixedSigns(5))[:8]


@pytest.mark.parametrize("axis", [0, 1, -2], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_rotating_back_undoes(dtype, axis):
    x = normal((32, 16, 3), dtype)
    eps = jnp.asarray(NVFP4_SIGNS, jnp.float32)
    back = rotate_back(rotate(x, eps, axis), eps, axis)
    assert back.shape == x.shape and back.dtype == jnp.float32
    # Four sums and their inverses, each correct to half a unit of values below 16.
    bound = 8 * 2.0**-24 * 16
    np.testing.assert_allclose(back, np.asarray(x, np.float32), rtol=0, atol=bound)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_dtype_rotates_as_its_float32_values(dtype):
    # From bfloat16 only within a span of 2^12; integers of 7 bits have one of 2^7.
    x = jnp.round(normal((4, 64), dtype) * 16)
    eps = jnp.asarray(signs(FixedSigns(1)), jnp.float32)
    rotated = rotate(x.astype(jnp.float32), eps, 1)
    np.testing.assert_array_equal(rotate(x, eps, 1), rotated)


def test_float16_sums_keep_their_order():
    spread = np.ldexp(np.float16(1), np.arange(256)[None] % 16 - 8)
    x = normal((64, 256), "float16") * jnp.asarray(spread)
    eps = jnp.asarray(signs(FixedSigns(1), size=256), jnp.float32)
    rotated = rotate(x.astype(jnp.float32), eps, 1)
    np.testing.assert_array_equal(rotate(x, eps, 1), rotated)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_not_finite_fills_its_run(dtype, value):
    x = normal((2, 48), dtype).at[1, 20].set(value)
    eps = jnp.asarray(NVFP4_SIGNS, jnp.float32)
    finite = np.isfinite(rotate(x, eps, 1))
    expected = np.ones((2, 48), bool)
    expected[1, 16:32] = False
    np.testing.assert_array_equal(finite, expected)


def test_large_values_stay_finite_up_to_their_share():
    largest = np.finfo(np.float32).max
    eps = jnp.ones(16, jnp.float32)
    rotated = rotate(jnp.full((1, 16), largest / 16), eps, 1)
    np.testing.assert_array_equal(rotated, [[largest / 4] + [0] * 15])


@pytest.mark.parametrize("shape", [(0, 16), (3, 0)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_empty(dtype, shape):
    eps = jnp.ones(16, jnp.float32)
    assert rotate(jnp.zeros(shape, dtype), eps, 1).shape == shape
    assert rotate_back(jnp.zeros(shape), eps, 1).shape == shape


def test_fixed_signs_are_numbers_also_where_arrays_are_parts():
    rotation = Hadamard(16, FixedSigns(71))  # which nothing has asked for
    expected = tuple(np.asarray(hadamard.sign_vector(rotation, None, 0)).tolist())
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    found = []

    def part(x):
        found.append(hadamard.signs_of(rotation, None, 0))
        return x

    with jax.set_mesh(mesh):
        mapped = jax.shard_map(part, in_specs=P("x"), out_specs=P("x"))
        jax.jit(jax.checkpoint(mapped))(jnp.ones(8))
    assert found[0] == expected and set(expected) == {-1.0, 1.0}
