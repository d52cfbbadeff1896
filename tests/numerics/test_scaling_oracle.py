"""Block and tensor scales against exact arithmetic, gfloat and plain numpy float32."""

import fractions
import math

import gfloat
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gfloat import formats as gfloat_formats

import fp4jax
from fp4jax.numerics import (
    E2M1,
    E2M1_TO_2,
    E4M3,
    E5M2,
    E8M0,
    INT2,
    UE5M3,
    UE5M3_FN,
    UNIFORM,
    Fresh,
    Quantizer,
    Scale,
    formats,
    scaling,
)
from tests.golden import inputs

f32 = np.float32
quantize = jax.jit(fp4jax.quantize, static_argnums=1)
block_scale = jax.jit(
    scaling.block_scale, static_argnums=(1, 2), static_argnames=("headroom",)
)

# g_max, exponent of g_max, mantissa bits, and the range of E8M0 exponents.
GRIDS = {
    E2M1: (6, 2, 1, -125, 125),
    UNIFORM: (7, 2, 2, -125, 125),
    INT2: (4, 2, 0, -125, 125),
    E2M1_TO_2: (4, 2, 1, -125, 125),
    E4M3: (448, 8, 3, -117, 119),
    E5M2: (57344, 15, 2, -110, 112),
}
# Mantissa of 3 bits: exponent of the lowest binade, largest magnitude.
SCALES = {E4M3: (-6, 448.0), UE5M3: (-14, 61440.0), UE5M3_FN: (-14, 114688.0)}


def floor_log2(x):
    """Of a positive Fraction or integer, exactly."""
    e = math.floor(math.log2(x))
    e -= fractions.Fraction(2) ** e > x
    return e + (fractions.Fraction(2) ** (e + 1) <= x)


def e8m0_exponent(amax, rule, grid):
    """The exponent that the named rule gives, before it is clamped."""
    g_max, emax, mantissa_bits, *_ = GRIDS[grid]
    amax = fractions.Fraction(float(amax))
    if rule == "floor":
        return floor_log2(amax) - emax
    if rule == "even":  # round() of a Fraction takes ties to even.
        unit = fractions.Fraction(2) ** (floor_log2(amax) - mantissa_bits)
        return floor_log2(round(amax / unit) * unit) - emax
    ratio = amax / g_max
    exponent = floor_log2(ratio)
    return exponent + (fractions.Fraction(2) ** exponent < ratio)


def amaxes(g_max, mantissa_bits):
    """Normal float32 around every value at which a rule can change its mind."""
    edges = [1, 2 - 2.0 ** (-mantissa_bits - 1), g_max, 2 - 2.0**-mantissa_bits]
    edges = np.ldexp(f32(edges)[:, None], np.arange(-40, 41, 8)).ravel()
    rng = np.random.default_rng(0)
    return np.concatenate(
        [
            edges,
            np.nextafter(edges, f32(0)),
            np.nextafter(edges, f32(np.inf)),
            np.exp2(rng.uniform(-126, 128, 500)).astype(f32),
            f32([2.0**-126, np.finfo(f32).max]),
        ]
    )


# The floor rule has no meaning on a uniform grid.
RULES = [(grid, rule) for grid in GRIDS for rule in ("truncation_free", "even")]
RULES += [(grid, "floor") for grid in (E2M1, E4M3, E5M2)]


@pytest.mark.parametrize(("grid", "rule"), RULES, ids=str)
def test_e8m0_rules_equal_exact_arithmetic(grid, rule):
    g_max, _, mantissa_bits, low, high = GRIDS[grid]
    amax = amaxes(g_max, mantissa_bits)
    exponents = np.clip([e8m0_exponent(a, rule, grid) for a in amax], low, high)
    scale, inverse = block_scale(jnp.asarray(amax), Scale(E8M0, rule=rule), grid)
    np.testing.assert_array_equal(scale, np.ldexp(f32(1), exponents))
    np.testing.assert_array_equal(inverse, np.ldexp(f32(1), -exponents))
    zeros = jnp.array([0.0, 1e-40], jnp.float32)
    lowest, _ = block_scale(zeros, Scale(E8M0, rule=rule), grid)
    np.testing.assert_array_equal(lowest, np.ldexp(f32(1), [low, low]))


def test_e8m0_rules_on_e2m1_equal_the_published_table():
    amax = jnp.array([6, 6.5, 7], jnp.float32)
    table = {"floor": [1, 1, 1], "truncation_free": [1, 2, 2], "even": [1, 1, 2]}
    for rule, expected in table.items():
        scale, _ = block_scale(amax, Scale(E8M0, rule=rule), E2M1)
        assert scale.tolist() == expected


@pytest.mark.parametrize(
    ("grid", "reference"),
    [
        (E2M1, gfloat_formats.format_info_mxfp4_e2m1),
        (E4M3, gfloat_formats.format_info_mxfp8_e4m3),
        (E5M2, gfloat_formats.format_info_mxfp8_e5m2),
    ],
    ids=["mxfp4", "mxfp8-e4m3", "mxfp8-e5m2"],
)
def test_floor_blocks_equal_gfloat(grid, reference):
    rng = np.random.default_rng(3)
    x = rng.standard_t(3, (40, 32)) * np.exp2(rng.integers(-20, 20, (40, 1)))
    x = x.astype(f32)
    quantizer = Quantizer(grid, block=32, scale=Scale(E8M0, rule="floor"))
    expected = [
        gfloat.quantize_block(reference, row, gfloat.compute_scale_amax)
        for row in x.astype(float)
    ]
    x_dq = fp4jax.dequantize(quantize(jnp.asarray(x), quantizer))
    np.testing.assert_array_equal(x_dq, np.array(expected))


def round_to_mantissa(x, mantissa_bits, emin, largest):
    """Nearest even in float64: exact for any float32 x."""
    x = np.minimum(np.float64(x), largest)
    step = np.exp2(np.maximum(np.frexp(x)[1] - 1, emin) - mantissa_bits)
    return np.minimum(np.rint(x / step) * step, largest)


def round_element(t, grid):
    """Signed members of a 4-bit grid, nearest even."""
    emin = {E2M1: 0, UNIFORM: 2}[grid]
    g_max, _, mantissa_bits, *_ = GRIDS[grid]
    return np.sign(t) * round_to_mantissa(np.abs(t), mantissa_bits, emin, g_max)


def two_level(x, grid, fmt, target, pad, real=f32):
    """Element values, block scales and tensor scale, every step rounded to `real`.

    s_enc = g_max target / amax,  scale = round(amax_block (s_enc f32(1 / g_max))),
    inv = 1 / (scale (1 / s_enc))
    """
    g_max = GRIDS[grid][0]
    per_unit = real((17 / 16 if pad else 1) / g_max)
    blocks = x.astype(real).reshape(x.shape[0], -1, 16)
    amax = np.abs(blocks).max(-1)
    s_enc = real(g_max * target) / amax.max()
    scale = round_to_mantissa(amax * (s_enc * per_unit), 3, *SCALES[fmt]).astype(real)
    if fmt != E4M3:
        scale = np.where(scale == 0, real(1), scale)
    tensor_scale = real(1) / s_enc
    with np.errstate(divide="ignore"):
        inverse = np.where(scale == 0, real(0), real(1) / (scale * tensor_scale))
    t = blocks * inverse[..., None]
    return round_element(t, grid), t, scale, tensor_scale


TWO_LEVEL = [
    pytest.param(grid, fmt, target, pad, id=f"{grid}-{fmt}-{target}-pad{pad:d}")
    for grid, fmt, target, pad in [
        (E2M1, UE5M3, 448.0, False),
        (E2M1, UE5M3, 2048.0, True),
        (E2M1, UE5M3_FN, 114688.0, False),
        (E2M1, E4M3, 448.0, True),
        (UNIFORM, E4M3, 448.0, False),
        (UNIFORM, UE5M3, 448.0, True),
    ]
]


@pytest.mark.parametrize(("grid", "fmt", "target", "pad"), TWO_LEVEL)
def test_two_levels_equal_numpy_float32(grid, fmt, target, pad):
    quantizer = Quantizer(grid, scale=Scale(fmt, pad=pad), tensor_scale=Fresh(target))
    for x in (
        inputs.matrix("normal", "float32", (64, 512)),
        inputs.matrix("heavy", "bfloat16", (64, 512)),
        inputs.ladder((1, 16), (64, 512)),
    ):
        q = quantize(jnp.asarray(x), quantizer)
        values, _, scale, tensor_scale = two_level(x, grid, fmt, target, pad)
        np.testing.assert_array_equal(q.scales, scale)
        np.testing.assert_array_equal(q.tensor_scale, tensor_scale)
        decoded = formats.decode(q.codes, grid)
        np.testing.assert_array_equal(decoded, values.reshape(x.shape))


@pytest.mark.parametrize(("grid", "fmt", "target", "pad"), TWO_LEVEL)
def test_two_levels_equal_float64_but_for_ties(grid, fmt, target, pad):
    x = inputs.matrix("normal", "float32", (64, 512))
    quantizer = Quantizer(grid, scale=Scale(fmt, pad=pad), tensor_scale=Fresh(target))
    q = quantize(jnp.asarray(x), quantizer)
    values, t, scale, _ = two_level(x, grid, fmt, target, pad, np.float64)
    same_scale = np.repeat(np.asarray(q.scales) == scale, 16, 1)
    assert same_scale.mean() > 0.999
    decoded = np.asarray(formats.decode(q.codes, grid))
    differs = same_scale & (decoded != values.reshape(x.shape))
    # Float32 moves t by less than 2^-21 of itself; only a tie can flip.
    t = t.reshape(x.shape)
    below, above = (round_element(t * (1 + r), grid) for r in (-(2**-21), 2**-21))
    assert np.all((decoded == below) | (decoded == above) | ~differs)
    assert differs.mean() < 1e-4


@pytest.mark.parametrize("pad", [False, True])
@pytest.mark.parametrize("fmt", SCALES, ids=repr)
def test_two_level_scales_equal_numpy_float32_where_they_tie(fmt, pad):
    # Only here does the order of the two products decide.
    midpoints = (np.array(fmt.magnitudes[1:]) + fmt.magnitudes[:-1]) / 2
    per_unit = f32((17 / 16 if pad else 1) / 6)
    for tensor_amax in f32([1.37, 3e-5, 812.3, 0.7, 5.9]):
        s_enc = f32(2688) / tensor_amax
        amax = (midpoints / np.float64(s_enc) / per_unit).astype(f32).view(np.int32)
        amax = np.add.outer(amax, np.arange(-4, 5)).astype(np.int32).view(f32)
        expected = round_to_mantissa(amax * (s_enc * per_unit), 3, *SCALES[fmt])
        if fmt != E4M3:
            expected = np.where(expected == 0, 1, expected)
        scale, inverse = block_scale(
            jnp.asarray(amax),
            Scale(fmt),
            E2M1,
            headroom=17 / 16 if pad else 1.0,
            factor=jnp.asarray(s_enc),
        )
        np.testing.assert_array_equal(scale, expected.astype(f32))
        with np.errstate(divide="ignore"):
            expected = f32(1) / (expected.astype(f32) * (f32(1) / s_enc))
        np.testing.assert_array_equal(
            inverse, np.where(np.isinf(expected), 0, expected)
        )


@pytest.mark.parametrize("fmt", SCALES, ids=repr)
@pytest.mark.parametrize("grid", [E2M1, UNIFORM], ids=repr)
def test_one_level_scales_equal_numpy_float32(grid, fmt):
    g_max = GRIDS[grid][0]
    emin, largest = SCALES[fmt]
    codes = np.float64(fmt.magnitudes)
    edges = (np.concatenate([codes, (codes[1:] + codes[:-1]) / 2]) * g_max).astype(f32)
    amax = np.concatenate(
        [edges, np.nextafter(edges, f32(np.inf)), np.nextafter(edges, f32(0))]
    )
    rounded = round_to_mantissa(amax * f32(1 / g_max), 3, emin, largest).astype(f32)
    if fmt != E4M3:
        rounded = np.where(rounded == 0, f32(1), rounded)
    scale, inverse = block_scale(jnp.asarray(amax), Scale(fmt), grid)
    np.testing.assert_array_equal(scale, rounded)
    with np.errstate(divide="ignore"):
        expected = np.where(rounded == 0, 0, f32(1) / rounded)
    np.testing.assert_array_equal(inverse, expected)


@pytest.mark.parametrize("grid", GRIDS, ids=repr)
def test_float32_scales_equal_numpy(grid):
    rng = np.random.default_rng(4)
    amax = np.exp2(rng.uniform(-100, 128, 100_000)).astype(f32)
    amax = np.concatenate([amax, f32([0, 2.0**-100, 2.0**-101, np.finfo(f32).max])])
    expected = np.where(amax < 2.0**-100, 0, amax * f32(1 / GRIDS[grid][0]))
    scale, inverse = block_scale(jnp.asarray(amax), Scale(), grid)
    np.testing.assert_array_equal(scale, expected)
    with np.errstate(divide="ignore"):
        expected = np.where(expected == 0, 0, f32(1) / expected)
    np.testing.assert_array_equal(inverse, expected)
