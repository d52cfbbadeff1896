"""Codecs and rounding against ml_dtypes, gfloat, brute force and exact integers."""

import fractions
import math

import gfloat
import jax
import jax.numpy as jnp
import ml_dtypes
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
    Quantizer,
    formats,
    rounding,
)

encode = jax.jit(formats.encode, static_argnums=1)
decode = jax.jit(formats.decode, static_argnums=1)
encode_magnitude = jax.jit(formats.encode_magnitude, static_argnums=1)
decode_magnitude = jax.jit(formats.decode_magnitude, static_argnums=1)
round_nearest = jax.jit(rounding.round_nearest, static_argnums=1)
round_stochastic = jax.jit(rounding.round_stochastic, static_argnums=2)

ML_DTYPES = {
    E2M1: ml_dtypes.float4_e2m1fn,
    E4M3: ml_dtypes.float8_e4m3fn,
    E5M2: ml_dtypes.float8_e5m2,
}


def small_float(name, bits, precision, bias, *, signed, infinite=False, nans=0):
    return gfloat.FormatInfo(
        name=name,
        k=bits,
        precision=precision,
        bias=bias,
        is_signed=signed,
        domain=gfloat.Domain.Extended if infinite else gfloat.Domain.Finite,
        has_nz=signed,
        num_high_nans=nans,
        has_subnormals=True,
        is_twos_complement=False,
    )


# E1M2 is the uniform grid times 1/4.
E1M2 = small_float("e1m2", 4, 3, 1, signed=True)
GFLOAT = {
    E2M1: gfloat_formats.format_info_ocp_e2m1,
    E4M3: gfloat_formats.format_info_ocp_e4m3,
    E5M2: gfloat_formats.format_info_ocp_e5m2,
    UE5M3: small_float("ue5m3", 8, 4, 15, signed=False, infinite=True, nans=7),
    UE5M3_FN: small_float("ue5m3_fn", 8, 4, 15, signed=False, nans=1),
}


def ml_dtypes_magnitudes(fmt):
    kind = ML_DTYPES[fmt]
    codes = np.arange(1 << ml_dtypes.finfo(kind).bits - 1, dtype=np.uint8)
    values = codes.view(kind).astype(np.float64)
    return values[np.isfinite(values)]


# All finite magnitudes by code, written out or taken from another library.
MAGNITUDES = {
    E2M1: np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6]),
    UNIFORM: np.arange(8.0),
    INT2: np.array([0.0, 4.0]),
    E2M1_TO_2: np.arange(5.0),
    E4M3: ml_dtypes_magnitudes(E4M3),
    E5M2: ml_dtypes_magnitudes(E5M2),
    UE5M3: np.array([gfloat.decode_float(GFLOAT[UE5M3], i).fval for i in range(0xF8)]),
    UE5M3_FN: np.array(
        [gfloat.decode_float(GFLOAT[UE5M3_FN], i).fval for i in range(0xFF)]
    ),
}
ALL = pytest.mark.parametrize("fmt", MAGNITUDES, ids=repr)
GRIDS = pytest.mark.parametrize(
    "fmt", [E2M1, UNIFORM, INT2, E2M1_TO_2, E4M3, E5M2], ids=repr
)


def probes(fmt):
    """Float32 magnitudes: codes, midpoints, their float neighbours, others, no inf."""
    m = MAGNITUDES[fmt]
    special = np.concatenate([m, (m[1:] + m[:-1]) / 2, [m[-1] * 17 / 16]])
    special = special.astype(np.float32)
    rng = np.random.default_rng(0)
    return np.concatenate(
        [
            special,
            np.nextafter(special, np.float32(np.inf)),
            np.nextafter(special, np.float32(-np.inf)).clip(0),
            rng.uniform(0, 1.1 * m[-1], 2000).astype(np.float32),
            (m[1] * 2 ** rng.uniform(-3, math.log2(m[-1] / m[1]) + 1, 2000)).astype(
                np.float32
            ),
            np.float32([2.0**-126, np.finfo(np.float32).max]),
        ]
    )


def nearest_codes(t, magnitudes):
    """The code whose magnitude is nearest in float64, the even one of two."""
    t = np.minimum(np.float64(t), 2 * magnitudes[-1])  # Beyond, float64 is too coarse.
    distance = np.abs(t[:, None] - magnitudes)
    is_nearest = distance == distance.min(1, keepdims=True)
    even = np.arange(len(magnitudes)) % 2 == 0
    return np.where(
        is_nearest.sum(1) == 2, (is_nearest & even).argmax(1), is_nearest.argmax(1)
    )


@ALL
def test_tables(fmt):
    np.testing.assert_array_equal(np.array(fmt.magnitudes), MAGNITUDES[fmt])
    assert fmt.max == MAGNITUDES[fmt][-1]
    assert fmt.emax == math.floor(math.log2(fmt.max))


@ALL
def test_every_magnitude_code(fmt):
    codes = np.arange(len(MAGNITUDES[fmt]), dtype=np.uint8)
    decoded = decode_magnitude(jnp.asarray(codes), fmt)
    np.testing.assert_array_equal(decoded, MAGNITUDES[fmt].astype(np.float32))
    np.testing.assert_array_equal(encode_magnitude(decoded, fmt), codes)


@pytest.mark.parametrize("fmt", [E2M1, E4M3, E5M2], ids=repr)
def test_every_signed_code_equals_ml_dtypes(fmt):
    codes = np.arange(2 << fmt.magnitude_bits, dtype=np.uint8)
    expected = codes.view(ML_DTYPES[fmt]).astype(np.float32)
    decoded = np.asarray(decode(jnp.asarray(codes), fmt))
    # The infinities of E5M2 and its other NaNs are never emitted.
    finite = np.isfinite(expected)
    np.testing.assert_array_equal(decoded[finite], expected[finite])
    back = np.asarray(encode(jnp.asarray(decoded), fmt))
    is_negative_zero = codes == 1 << fmt.magnitude_bits
    np.testing.assert_array_equal(
        back[finite], np.where(is_negative_zero, 0, codes)[finite]
    )


def test_every_e1m2_code_equals_gfloat():
    codes = np.arange(16, dtype=np.uint8)
    expected = [gfloat.decode_float(E1M2, int(i)).fval * 4 for i in codes]
    np.testing.assert_array_equal(decode(jnp.asarray(codes), UNIFORM), expected)


def test_every_ue5m3_code_equals_gfloat():
    codes = np.arange(256, dtype=np.uint8)
    for fmt in (UE5M3, UE5M3_FN):
        decoded = np.asarray(decode_magnitude(jnp.asarray(codes), fmt))
        expected = [gfloat.decode_float(GFLOAT[fmt], int(i)).fval for i in codes]
        # The default never emits 0xF8 to 0xFE, infinity and NaN there.
        emitted = (codes <= 0xF7) | (codes == 0xFF) if fmt == UE5M3 else codes < 256
        np.testing.assert_array_equal(decoded[emitted], np.array(expected)[emitted])
        nan_code = encode_magnitude(jnp.float32(jnp.nan), fmt)
        assert nan_code == 0xFF


def test_every_e8m0_code_equals_ml_dtypes():
    codes = np.arange(1, 256, dtype=np.uint8)
    expected = codes.view(ml_dtypes.float8_e8m0fnu).astype(np.float32)
    decoded = decode_magnitude(jnp.asarray(codes), E8M0)
    np.testing.assert_array_equal(decoded, expected)
    np.testing.assert_array_equal(encode_magnitude(decoded, E8M0), codes)


@ALL
def test_nearest_equals_brute_force(fmt):
    t = probes(fmt)
    codes = nearest_codes(t, MAGNITUDES[fmt])
    for function in (rounding.round_nearest, round_nearest):
        rounded = function(jnp.asarray(t), fmt)
        np.testing.assert_array_equal(rounded, MAGNITUDES[fmt][codes].astype("f4"))
        np.testing.assert_array_equal(encode_magnitude(rounded, fmt), codes)


@ALL
def test_nearest_saturates_non_finite(fmt):
    t = jnp.array([jnp.inf, jnp.nan], jnp.float32)
    np.testing.assert_array_equal(round_nearest(t, fmt), [fmt.max] * 2)


@pytest.mark.parametrize("fmt", ML_DTYPES, ids=repr)
def test_nearest_equals_ml_dtypes(fmt):
    t = np.minimum(probes(fmt), np.float32(fmt.max))
    codes = t.astype(ML_DTYPES[fmt]).view(np.uint8)
    rounded = round_nearest(jnp.asarray(t), fmt)
    np.testing.assert_array_equal(encode_magnitude(rounded, fmt), codes)


@pytest.mark.parametrize("fmt", GFLOAT, ids=repr)
def test_nearest_equals_gfloat(fmt):
    t = probes(fmt)
    expected = [gfloat.round_float(GFLOAT[fmt], float(v), sat=True) for v in t]
    codes = [gfloat.encode_float(GFLOAT[fmt], v) for v in expected]
    rounded = round_nearest(jnp.asarray(t), fmt)
    np.testing.assert_array_equal(rounded, np.float32(expected))
    np.testing.assert_array_equal(encode_magnitude(rounded, fmt), codes)


def test_uniform_nearest_equals_gfloat_e1m2():
    t = probes(UNIFORM)
    expected = [gfloat.round_float(E1M2, float(v) / 4, sat=True) * 4 for v in t]
    rounded = round_nearest(jnp.asarray(t), UNIFORM)
    np.testing.assert_array_equal(rounded, np.float32(expected))


@GRIDS
def test_quantize_rounds_signed_values_to_the_nearest_code(fmt):
    # Blocks whose amax is g_max have scale 1 and inv 1.
    t = np.minimum(probes(fmt), np.float32(fmt.max))
    t = np.concatenate([t, -t])
    t = np.pad(t, (0, -len(t) % 15)).reshape(-1, 15)
    x = np.concatenate([np.full((len(t), 1), fmt.max, np.float32), t], 1)
    quantize = jax.jit(fp4jax.quantize, static_argnums=1)
    q = quantize(jnp.asarray(x), Quantizer(fmt, block=16))
    np.testing.assert_array_equal(q.scales, np.ones_like(q.scales))
    codes = nearest_codes(np.abs(x).ravel(), MAGNITUDES[fmt]).reshape(x.shape)
    sign = np.where((x < 0) & (codes > 0), 1 << fmt.magnitude_bits, 0)
    np.testing.assert_array_equal(q.codes, codes + sign)
    expected = np.copysign(MAGNITUDES[fmt][codes], x).astype(np.float32)
    np.testing.assert_array_equal(fp4jax.dequantize(q), expected)


def stochastic_code(t, u, magnitudes):
    """The code of t under 16 bits u, in exact arithmetic.

    Between a <= t <= b it is that of b where (t - a) / (b - a) + u / 2^16 >= 1.
    """
    t = min(fractions.Fraction(float(t)), fractions.Fraction(magnitudes[-1]))
    code = int(np.searchsorted(magnitudes, float(t), side="right")) - 1
    if code == len(magnitudes) - 1:
        return code
    a, b = (fractions.Fraction(m) for m in magnitudes[code : code + 2])
    return code + int((t - a) / (b - a) * 2**16 + u >= 2**16)


@GRIDS
def test_stochastic_equals_exact_arithmetic(fmt):
    m = MAGNITUDES[fmt]
    t = probes(fmt)
    rng = np.random.default_rng(1)
    t = np.concatenate([t[: 6 * len(m)], rng.choice(t, 300, replace=False)])
    # For each t also the two bits patterns between which its decision changes.
    lower = m[np.searchsorted(m, np.minimum(t, m[-1]).astype(float), "right") - 1]
    upper = m[np.minimum(np.searchsorted(m, lower) + 1, len(m) - 1)]
    p = (np.float64(np.minimum(t, m[-1])) - lower) / np.where(
        upper > lower, upper - lower, 1
    )
    edge = (2**16 - np.floor(p * 2**16)).astype(np.int64)
    u = np.stack(
        [
            np.zeros_like(edge),
            edge.clip(0, 65535),
            (edge - 1).clip(0, 65535),
            np.full_like(edge, 65535),
            rng.integers(0, 65536, len(t)),
        ]
    )
    expected = [
        [stochastic_code(a, int(b), m) for a, b in zip(t, row, strict=True)]
        for row in u
    ]
    t, u = jnp.broadcast_to(t, u.shape), jnp.asarray(u, jnp.uint32)
    rounded = round_stochastic(t, u, fmt)
    np.testing.assert_array_equal(encode_magnitude(rounded, fmt), expected)


@pytest.mark.parametrize("fmt", [E2M1, E4M3, E5M2], ids=repr)
def test_stochastic_equals_gfloat(fmt):
    rng = np.random.default_rng(2)
    t = rng.choice(probes(fmt), 2000)
    u = rng.integers(0, 65536, 2000)
    mode = gfloat.RoundMode.StochasticFastest
    expected = [
        gfloat.round_float(GFLOAT[fmt], float(a), mode, True, int(b), 16)
        for a, b in zip(t, u, strict=True)
    ]
    u = jnp.asarray(u, jnp.uint32)
    rounded = round_stochastic(jnp.asarray(t), u, fmt)
    np.testing.assert_array_equal(rounded, np.float32(expected))


@GRIDS
def test_stochastic_is_unbiased_over_all_bits(fmt):
    m = MAGNITUDES[fmt]
    t = np.float32([0.3 * m[1], 0.5 * (m[-1] + m[-2]), 0.77 * m[-1], m[-1]])[:, None]
    u = jnp.arange(65536, dtype=jnp.uint32)[None]
    mean = np.asarray(round_stochastic(jnp.asarray(t), u, fmt), float).mean(1)
    step = np.diff(m).max()
    # The probability is truncated to 16 bits.
    assert np.all(mean <= t[:, 0]) and np.all(mean > t[:, 0] - step * 2.0**-16)
