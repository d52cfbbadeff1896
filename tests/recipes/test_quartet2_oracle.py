"""MS-EDEN against its equations in float64, and its published error.

code = e4m3(amax_block / val_max / s),  q = round(x / (code s))       to nearest
S = <x, x> / <x, code s q> of 128,      scale = code S                stochastically
val_max = 6 / (17/16 0.93),  s = amax_tensor / (val_max 255.99)
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import fp4jax
from fp4jax import recipes
from fp4jax.numerics import (
    E2M1,
    E4M3,
    FixedSigns,
    Fresh,
    Hadamard,
    Quantizer,
    Scale,
    Site,
    Stochastic,
    formats,
    hadamard,
)
from tests.golden import inputs

VAL_MAX = 6 / (17 / 16 * 0.93)
GROUP = 128
E4M3_VALUES = np.array(E4M3.magnitudes)
QUANTIZER = recipes.quartet2().dgrad.dy
FIXED = dataclasses.replace(QUANTIZER, rotation=Hadamard(128, FixedSigns(3)))
SHAPE = (64, 512)


def to_dtype(x, dtype):
    return np.float64(np.float32(x).astype(dtype))


def rounded_scales(x):
    """Codes of the blocks before the correction, and the tensor scale."""
    amax = np.abs(x.reshape(x.shape[0], -1, 16)).max(-1)
    tensor_scale = amax.max() / (VAL_MAX * 255.99)
    codes = to_dtype(amax / VAL_MAX / tensor_scale, ml_dtypes.float8_e4m3fn)
    return codes, tensor_scale


def ms_eden(x):
    """Element values, exact scales before they are rounded, and the tensor scale."""
    x = np.float64(x)
    codes, tensor_scale = rounded_scales(x)
    step = np.repeat(codes * tensor_scale, 16, 1)
    t = np.divide(x, step, out=np.zeros_like(x), where=step > 0)
    values = to_dtype(np.clip(t, -6, 6), ml_dtypes.float4_e2m1fn)
    groups = lambda a: a.reshape(x.shape[0], -1, GROUP)
    power = np.sum(groups(x) ** 2, -1)
    kept = np.sum(groups(x) * groups(values * step), -1)
    correction = np.divide(power, kept, out=np.ones_like(power), where=kept > 0)
    return values, codes * np.repeat(correction, GROUP // 16, 1), tensor_scale


def neighbors(scales):
    """The members of E4M3 around each scale."""
    above = np.searchsorted(E4M3_VALUES, scales)
    below = np.where(E4M3_VALUES[above] == scales, above, above - 1)
    return E4M3_VALUES[below], E4M3_VALUES[above]


def rotated(x):
    signs = hadamard.sign_vector(FIXED.rotation, None, 0)
    return np.asarray(jax.jit(hadamard.rotate, static_argnums=2)(x, signs, 1))


@functools.partial(jax.jit, static_argnums=1)
def draws(x, quantizer, keys):
    """Block scales and values for every key."""

    def draw(key):
        q = fp4jax.quantize(x, quantizer, key=key, site=Site.DGRAD_DY)
        return q.scales, fp4jax.dequantize(q)

    return jax.lax.map(draw, keys)


def keys(count):
    return jax.random.split(jax.random.key(5), count)


def dead():
    """Groups of zeros, and groups whose scales round to zero."""
    x = inputs.matrix("normal", "float32", SHAPE)
    x[::4] = 0
    x[1::4, 128:256] *= 2.0**-30
    return x


def steep():
    """Rotated, the blocks of a group have amaxes from 1 to 2^-7."""
    x = inputs.matrix("normal", "float32", SHAPE)
    x *= np.repeat(np.float32(2) ** -(np.arange(512 // 16) % 8), 16)
    signs = hadamard.sign_vector(FIXED.rotation, None, 0)
    return np.asarray(hadamard.rotate_back(jnp.asarray(x), signs, 1))


MATRICES = {
    "normal": lambda: inputs.matrix("normal", "float32", SHAPE),
    "heavy": lambda: inputs.matrix("heavy", "bfloat16", SHAPE),
    "dead": dead,
    "steep": steep,
}


@pytest.mark.parametrize("name", MATRICES)
def test_codes_and_scales_equal_the_equations_but_for_ties(name):
    x = jnp.asarray(MATRICES[name]())
    quantize = jax.jit(fp4jax.quantize, static_argnums=1)
    q = quantize(x, FIXED, key=jax.random.key(1))
    values, scales, tensor_scale = ms_eden(rotated(x))
    np.testing.assert_allclose(q.tensor_scale, tensor_scale, rtol=2.0**-22)
    # S is taken of elements in units of 2^-9 of a step, off by less than 2^-14.
    low, _ = neighbors(scales * (1 - 2.0**-14))
    _, high = neighbors(scales * (1 + 2.0**-14))
    inside = np.asarray((q.scales >= low) & (q.scales <= high))
    assert np.mean(inside) > 0.999
    same = np.repeat(inside, 16, 1)
    decoded = np.asarray(formats.decode(q.codes, E2M1))
    assert np.mean((decoded == values)[same]) > 0.9999


@pytest.mark.parametrize("name", MATRICES)
def test_scales_are_unbiased_over_keys(name):
    x = jnp.asarray(MATRICES[name]()[:16])
    count = 512
    drawn = np.float64(draws(x, FIXED, keys(count))[0])
    _, scales, _ = ms_eden(rotated(x))
    low, high = neighbors(scales)
    near = np.all((drawn == low) | (drawn == high), 0)
    assert np.mean(near) > 0.99
    # A scale's variance is that of a coin between its neighbors.
    step = np.where(high > low, high - low, 1)
    share = (scales - low) / step
    deviation = np.sqrt(np.maximum(share * (1 - share), 1e-4) / count)
    z = ((drawn.mean(0) - scales) / step / deviation)[near]
    assert np.abs(z).max() < 5
    assert abs(z.mean()) < 5 / np.sqrt(z.size)
    assert np.mean(drawn.std(0)[high > low] > 0) > 0.9


def test_all_operands_of_the_backward_pass_have_one_quantizer():
    recipe = recipes.quartet2()
    backward = {recipe.sites[site] for site in list(Site)[2:]}
    assert backward == {QUANTIZER} and recipe.source == "fprop"


def test_values_are_unbiased_over_signs_and_scales():
    """The mean of n draws errs n times less than one draw, down to no floor."""
    x = inputs.matrix("heavy", "float32", (32, 256))
    count = 2000
    _, drawn = draws(jnp.asarray(x), QUANTIZER, keys(count))
    drawn = np.float64(drawn)
    power = np.sum(np.float64(x) ** 2)
    single = np.mean(np.sum((drawn - x) ** 2, (1, 2))) / power
    error = np.sum((drawn.mean(0) - x) ** 2) / power
    assert error < 1.2 * single / count
    slope = np.sum(drawn.mean(0) * x) / power
    assert abs(slope - 1) < 1e-4


def test_error_is_less_than_half_of_that_of_stochastic_rounding():
    """On Gaussian data; both padded by 17/16, as the comparison was published."""
    x = np.random.default_rng(0).standard_normal((1024, 1024), np.float32)
    stochastic = Quantizer(
        E2M1, scale=Scale(E4M3), tensor_scale=Fresh(448.0), rounding=Stochastic()
    )
    assert stochastic.pads
    power = np.sum(np.float64(x) ** 2)
    errors = {}
    for name, quantizer in (("sr", stochastic), ("eden", FIXED)):
        fake_quant = jax.jit(fp4jax.fake_quant, static_argnums=1)
        x_dq = fake_quant(jnp.asarray(x), quantizer, key=jax.random.key(2))
        errors[name] = np.sum((np.float64(x_dq) - x) ** 2) / power
    # Published: 23.5e-3 and 9.8e-3.
    assert abs(errors["sr"] - 23.5e-3) < 0.1e-3
    assert abs(errors["eden"] - 9.8e-3) < 0.1e-3
    assert errors["sr"] / errors["eden"] > 2.3
