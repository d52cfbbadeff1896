"""Scales of blocks and tensors at zero, at the tiny, and at what is not finite."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp4jax.numerics import E2M1, E4M3, E5M2, UE5M3, UE5M3_FN, UNIFORM, Fresh, scaling
from tests.numerics.cases import SCALES

block_scale = jax.jit(
    scaling.block_scale, static_argnums=(1, 2), static_argnames="headroom"
)
tensor_factor = jax.jit(scaling.tensor_factor, static_argnums=(1, 2))
ALL_SCALES = pytest.mark.parametrize("scale", SCALES)
# Where blocks of zeros get a scale that is not 0.
ZERO_SCALES = {"ue5m3": 1.0, "ue5m3_fn": 1.0} | dict.fromkeys(
    ["e8m0", "floor", "even"], 2.0**-125
)


@ALL_SCALES
def test_zero_block(scale):
    value, inverse = block_scale(jnp.zeros(1), SCALES[scale], E2M1)
    np.testing.assert_array_equal(value, [ZERO_SCALES.get(scale, 0)])
    assert jnp.isfinite(inverse[0])
    if scale in ("f32", "e4m3"):
        assert inverse[0] == 0


@ALL_SCALES
def test_not_finite_block_has_a_nan_scale(scale):
    amax = jnp.float32([np.inf, np.nan, 1.0])
    for result in block_scale(amax, SCALES[scale], E2M1):
        np.testing.assert_array_equal(np.isnan(result), [True, True, False])


@pytest.mark.parametrize("factor", [1.0, np.nan], ids=str)
def test_not_finite_factor_gives_nan_scales(factor):
    amax = jnp.float32([0.0, 1.0, np.nan])
    expected = [np.isnan(factor), np.isnan(factor), True]
    for result in block_scale(amax, SCALES["e4m3"], E2M1, factor=jnp.float32(factor)):
        np.testing.assert_array_equal(np.isnan(result), expected)


@ALL_SCALES
def test_inverse_is_that_of_the_scale(scale):
    amax = jnp.exp2(jnp.linspace(-5, 10, 301))
    value, inverse = block_scale(amax, SCALES[scale], E2M1)
    np.testing.assert_array_equal(inverse, np.float32(1) / np.asarray(value))


@pytest.mark.parametrize("scale", ["e4m3", "ue5m3", "ue5m3_fn"])
def test_padding_leaves_room_for_the_rounding(scale):
    spec = SCALES[scale]
    # One binade of scales, all normal; elements reach amax / scale.
    amax = jnp.linspace(6, 12, 1001)
    plain, padded = (
        np.asarray(
            amax / block_scale(amax, spec, E2M1, headroom=17 / 16 if pad else 1.0)[0]
        )
        for pad in (False, True)
    )
    assert 6 < plain.max() <= 6 * 17 / 16
    assert padded.max() <= 6 * (1 + 2.0**-22)
    same, _ = block_scale(amax * jnp.float32(17 / 16), spec, E2M1)
    value, _ = block_scale(amax, spec, E2M1, headroom=17 / 16)
    # Up to the rounding of that product, which moves ties.
    assert np.mean(np.asarray(same) != np.asarray(value)) < 0.01


@pytest.mark.parametrize("scale", ["ue5m3", "ue5m3_fn"])
def test_ue5m3_replaces_a_code_of_zero_by_the_value_one(scale):
    smallest = np.float32(6 * 2.0**-18)  # half the first step: a tie, to even
    amax = jnp.float32([smallest, np.nextafter(smallest, np.float32(1))])
    value, _ = block_scale(amax, SCALES[scale], E2M1)
    np.testing.assert_array_equal(value, [1.0, 2.0**-17])


def test_e4m3_keeps_a_code_of_zero():
    smallest = np.float32(6 * 2.0**-10)
    amax = jnp.float32([smallest, np.nextafter(smallest, np.float32(1))])
    value, inverse = block_scale(amax, SCALES["e4m3"], E2M1)
    np.testing.assert_array_equal(value, [0, 2.0**-9])
    np.testing.assert_array_equal(inverse, [0, 2.0**9])


def test_a_tiny_block_under_float32_scales_counts_as_zero():
    limit = np.float32(2.0**-100)
    amax = jnp.float32([np.nextafter(limit, np.float32(0)), limit, 1e-40])
    value, inverse = block_scale(amax, SCALES["f32"], UNIFORM)
    np.testing.assert_array_equal(np.asarray(value) > 0, [False, True, False])
    np.testing.assert_array_equal(np.asarray(inverse) > 0, [False, True, False])


def test_a_scale_that_decodes_to_a_subnormal_gives_zeros():
    amax = jnp.float32([2.0**-90, 2.0**-121])
    factor = tensor_factor(amax[0], Fresh(61440.0), E5M2.max)
    value, inverse = block_scale(amax, SCALES["ue5m3"], E5M2, factor=factor)
    assert np.all(np.asarray(value) > 0) and float(value[1]) / float(factor) < 2.0**-126
    np.testing.assert_array_equal(np.asarray(inverse) > 0, [True, False])


@pytest.mark.parametrize("grid", [E2M1, UNIFORM, E4M3], ids=repr)
def test_tensor_factor(grid):
    limit = np.float32(2.0**-90)
    amax = np.float32([0, 1e-40, np.nextafter(limit, np.float32(0)), limit, 3.0, 3e38])
    factor = [tensor_factor(a, Fresh(448.0), grid.max) for a in amax]
    expected = np.float32(grid.max * 448) / amax[3:]
    np.testing.assert_array_equal(factor, [1, 1, 1, *expected])
    for amax in (np.inf, np.nan):
        assert jnp.isnan(tensor_factor(jnp.float32(amax), Fresh(448.0), grid.max))


def test_a_tensor_amax_held_too_low_saturates():
    factor = tensor_factor(jnp.float32(1e-20), Fresh(448.0), E2M1.max)
    for scale, largest in ((E4M3, 448), (UE5M3, 61440), (UE5M3_FN, 114688)):
        spec = scaling.Scale(scale)
        value, inverse = block_scale(jnp.float32([3e38]), spec, E2M1, factor=factor)
        assert value[0] == largest and jnp.isfinite(inverse[0]) and inverse[0] > 0
