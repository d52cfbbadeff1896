"""Layout, padding, edge values, random bits and errors of `quantize`."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp4jax
from fp4jax.numerics import E2M1, E8M0, UNIFORM, Fresh, Quantizer, Site, Stochastic
from tests.numerics import cases
from tests.numerics.cases import ALL, FEW, KEY, SCALES, quantize_all

NAMES = pytest.mark.parametrize("name", ALL)
SHAPE = (8, 72)
X = cases.normal(SHAPE)
OTHER_KEY = jax.random.key(1)
SR = Stochastic()


def some(*names):
    return {name: ALL[name] for name in names}


# Layout.


@NAMES
def test_shapes(name):
    q = cases.everything(X)[0][name]
    spec = q.quantizer
    block, run = spec.block_size, spec.rotation.size if spec.rotation else 1
    k = math.ceil(72 / math.lcm(block, run)) * math.lcm(block, run)
    assert q.codes.shape == (8, k)
    rows = math.ceil(8 / block) if spec.is_square else 8
    assert q.scales.shape == (rows, k // block)
    assert (q.tensor_scale is None) == (spec.tensor_scale is None)
    assert q.tensor_scale is None or q.tensor_scale.shape == ()
    assert (q.signs is None) == (spec.rotation is None)
    assert (q.axis, q.other) == (1, 0 if spec.is_square else None)
    assert (q.shape, q.dtype) == (SHAPE, jnp.float32)


def test_an_axis_is_as_good_as_the_last():
    names = ("e2m1-ue5m3_fn", "nvfp4-rht16", "uniform-f32-rht16-sr", "nvfp4-square-sr")
    columns = jax.jit(lambda x: quantize_all(some(*names), x, axis=0))(X.T)
    for name, q in columns.items():
        rows = cases.everything(X)[0][name]
        np.testing.assert_array_equal(q.codes.T, rows.codes, err_msg=name)
        np.testing.assert_array_equal(q.scales.T, rows.scales, err_msg=name)


def test_an_axis_between_others_is_as_good_as_the_last():
    rows = some("nvfp4", "uniform-f32-sr", "uniform-f32-rht16-sr")
    square = some("uniform-f32-square")

    @jax.jit
    def both(x):
        last, two_last = jnp.moveaxis(x, 1, -1), jnp.moveaxis(x, (2, 1), (-2, -1))
        between = (
            quantize_all(rows, x, axis=1),
            quantize_all(square, x, axis=1, other=2),
        )
        return between, (
            quantize_all(rows, last),
            quantize_all(square, two_last, other=-2),
        )

    between, moved = both(cases.normal((6, 20, 10), "bfloat16"))
    for source, a, b in zip(((1,), (2, 1)), between, moved, strict=True):
        to_end = tuple(range(-len(source), 0))
        for name in a:
            assert b[name].axis == 2
            for leaf in ("codes", "scales"):
                at_end = np.moveaxis(getattr(a[name], leaf), source, to_end)
                np.testing.assert_array_equal(at_end, getattr(b[name], leaf), name)


def test_squares_commute_with_transposition():
    along_columns = jax.jit(lambda x: quantize_all(cases.SQUARES, x, axis=0))
    # X along its columns has the squares of X along its rows; so has its transpose.
    for x, turn in ((X, lambda a: a), (X.T, np.transpose)):
        for name, q in along_columns(x).items():
            rows = cases.everything(X)[0][name]
            codes = turn(np.asarray(q.codes))[:8, :72]
            np.testing.assert_array_equal(codes, rows.codes[:, :72], err_msg=name)
            np.testing.assert_array_equal(turn(np.asarray(q.scales)), rows.scales, name)


def test_batch_dimensions_are_not_blocked_together():
    names = ("uniform-f32", "e2m1-e8m0-square")

    def quantize(x):
        rows, squares = (ALL[name] for name in names)
        return fp4jax.quantize(x, rows), fp4jax.quantize(x, squares, axis=-1, other=-2)

    x = cases.normal((3, 20, 40))
    whole, quantize_one = jax.jit(quantize)(x), jax.jit(quantize)
    for i in range(3):
        for q, part in zip(whole, quantize_one(x[i]), strict=True):
            np.testing.assert_array_equal(q.codes[i], part.codes)
            np.testing.assert_array_equal(q.scales[i], part.scales)


def test_zero_padding_is_explicit_padding():
    names = (
        "nvfp4-sr",
        "nvfp4-square-sr",
        "uniform-f32-rht16-sr",
        "uniform-e8m0-rht64",
    )

    @jax.jit
    def padded_first(x):
        result = {}
        for name, q in some(*names).items():
            multiple = math.lcm(q.block_size, q.rotation.size if q.rotation else 1)
            rows = -8 % q.block_size if q.is_square else 0
            padded = jnp.pad(x, ((0, rows), (0, -72 % multiple)))
            result[name] = fp4jax.quantize(padded, q, key=KEY)
        return result

    for name, q in padded_first(X).items():
        implicit = cases.everything(X)[0][name]
        np.testing.assert_array_equal(q.codes[:8], implicit.codes, err_msg=name)
        np.testing.assert_array_equal(q.scales, implicit.scales, err_msg=name)


def test_padding_has_code_zero():
    for name, q in cases.everything(X)[0].items():
        if q.signs is None:
            assert not np.any(q.codes[:, 72:]), name


def test_1d_array_is_a_row():
    rows = some("e2m1-e4m3", "uniform-f32-sr", "uniform-f32-rht16-sr")
    for name, q in jax.jit(lambda x: quantize_all(rows, x))(X[0]).items():
        matrix = cases.everything(X)[0][name]
        assert (q.shape, q.axis) == ((72,), 0)
        np.testing.assert_array_equal(q.codes, matrix.codes[0], err_msg=name)
        np.testing.assert_array_equal(q.scales, matrix.scales[0], err_msg=name)


@pytest.mark.parametrize("shape", [(0, 24), (8, 0), (0, 0)], ids=str)
def test_empty(shape):
    x = jnp.zeros(shape, jnp.bfloat16)
    qtensors = jax.jit(lambda x: quantize_all(FEW, x))(x)
    for name, value in jax.jit(cases.dequantize_all)(qtensors).items():
        assert value.shape == shape and value.dtype == x.dtype, name
        assert qtensors[name].tensor_scale in (None, 1)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_other_dtypes_quantize_as_their_float32_values(dtype):
    quantizers = some("e2m1-f32", "e4m3-e8m0", "uniform-ue5m3-two", "nvfp4-sr")
    x = X.astype(dtype)
    narrow = jax.jit(lambda x: quantize_all(quantizers, x))(x)
    values = jax.jit(cases.dequantize_all)(narrow)
    wide, wide_values = cases.everything(x.astype(jnp.float32))
    for name, q in narrow.items():
        assert q.dtype == values[name].dtype == x.dtype
        np.testing.assert_array_equal(values[name], wide_values[name].astype(dtype))
        cases.assert_same(
            (q.codes, q.scales, q.tensor_scale),
            (wide[name].codes, wide[name].scales, wide[name].tensor_scale),
        )


# Edge values, for each format of scale.

ONE_LEVEL = {
    f"{scale}-{grid}": Quantizer(grid, scale=spec)
    for grid in (E2M1, UNIFORM)
    for scale, spec in SCALES.items()
    if (scale, grid) != ("floor", UNIFORM)
}
TWO_LEVEL = {
    f"{scale}-{E2M1}-two": Quantizer(E2M1, scale=SCALES[scale], tensor_scale=Fresh())
    for scale in ("e4m3", "ue5m3", "ue5m3_fn")
}
EDGES = ONE_LEVEL | TWO_LEVEL
EDGES |= {
    f"{name}-sr": dataclasses.replace(EDGES[name], rounding=SR)
    for name in ("f32-E2M1", "e8m0-UNIFORM", "e4m3-E2M1-two", "ue5m3-E2M1-two")
}
EDGE_NAMES = pytest.mark.parametrize("name", EDGES)
ORDINARY = np.random.default_rng(0).uniform(-6, 6, 16).astype(np.float32)


@jax.jit
def quantize_tensors(x):
    """Codes, scales and values of every row of two blocks as a tensor of its own."""

    def one(x):
        qtensors = quantize_all(EDGES, x)
        values = cases.dequantize_all(qtensors)
        return {name: (q.codes, q.scales, values[name]) for name, q in qtensors.items()}

    return jax.vmap(one)(x)


def first_block(name, *first, second=ORDINARY):
    """Of a tensor of two blocks: codes, scale and values of the first; all values."""
    x = np.concatenate(
        [np.float32(first), np.zeros(16 - len(first), np.float32), second]
    )
    x = np.stack([x] * 2).astype(np.float32)  # one shape for all tests
    codes, scales, values = (np.asarray(a)[0] for a in quantize_tensors(x)[name])
    return codes[:16], scales[0], values[:16], values


@EDGE_NAMES
@pytest.mark.parametrize("zero", [0.0, -0.0], ids=str)
def test_zero_block(name, zero):
    codes, scale, values, _ = first_block(name, *[zero] * 16)
    assert not codes.any() and not values.any()
    fmt = EDGES[name].scale.format
    if fmt == E8M0:
        assert scale == 2.0**-125  # the lowest of its range, for grids of 4 bits
    else:
        assert scale == (1 if fmt.name.startswith("UE5M3") else 0)


@EDGE_NAMES
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf], ids=str)
def test_what_is_not_finite_poisons_its_block(name, value):
    _, scale, block, values = first_block(name, 1.0, value)
    assert np.isnan(scale) and np.isnan(block).all()
    *_, without = first_block(name, 1.0)
    if EDGES[name].tensor_scale is None:
        np.testing.assert_array_equal(values[16:], without[16:])
    else:
        assert np.isnan(values).all()


@EDGE_NAMES
def test_a_tiny_block_beside_a_huge_one(name):
    codes, scale, block, values = first_block(name, *[1e-20] * 16, second=[1e20] * 16)
    assert np.isfinite(values).all()
    if EDGES[name].scale.rounds_mantissa:
        # The scale underflows: to 0, or to a code of 0 that stands for 1.
        assert not codes.any() and not block.any()
        assert scale in (0, 1)
    else:
        # Half a step of the widest kind, relative to the amax.
        np.testing.assert_allclose(block, 1e-20, rtol=1 / 3)


@EDGE_NAMES
@pytest.mark.parametrize("second", [np.zeros(16), ORDINARY], ids=["alone", "beside"])
def test_a_subnormal_is_zero_or_itself(name, second):
    _, _, block, values = first_block(name, 1e-40, -1e-40, second=second)
    assert np.isfinite(values).all()
    assert np.all((block == 0) | (np.abs(block) == np.float32(1e-40)))


@EDGE_NAMES
def test_huge_values_stay_finite(name):
    _, scale, block, values = first_block(name, 3e38, -3e38, 1.0)
    assert np.isfinite(scale) and np.isfinite(values).all()
    assert block[0] > 0 > block[1]
    if not (EDGES[name].scale.rounds_mantissa and EDGES[name].tensor_scale is None):
        # One level of 3 mantissa bits ends far below.
        np.testing.assert_allclose(block[:2], [3e38, -3e38], rtol=1 / 3)


# A power of two, or a padded scale, may leave the largest code unused.
@pytest.mark.parametrize(
    "name",
    [n for n, q in EDGES.items() if q.scale.format != E8M0 and not q.is_stochastic],
)
@pytest.mark.parametrize("amax", [1.0, 5.7, 0.1, 1.9999999], ids=str)
def test_the_amax_of_a_block_has_the_largest_code(name, amax):
    spec = EDGES[name]
    codes, _, block, _ = first_block(name, amax, -amax, amax / 3)
    largest = len(spec.grid.magnitudes) - 1
    assert codes[:2].tolist() == [largest, largest | 8]
    if spec.scale.format.name == "F32":
        np.testing.assert_array_max_ulp(block[:2], np.float32([amax, -amax]), maxulp=1)


@pytest.mark.parametrize("value", [np.nan, np.inf], ids=str)
def test_a_rotation_spreads_what_is_not_finite_over_its_run(value):
    q = Quantizer(UNIFORM, block=8, rotation=ALL["nvfp4-rht16"].rotation)
    x = X[:, :64].at[3, 20].set(value)
    values = jax.jit(lambda x: fp4jax.fake_quant(x, q))(x)
    expected = np.zeros((8, 64), bool)
    expected[3, 16:32] = True
    np.testing.assert_array_equal(np.isnan(values), expected)


def test_a_nan_is_never_lost_in_a_large_array():
    q = cases.NVFP4
    x = jnp.ones((128, 128)).at[77, 33].set(jnp.nan)
    one_level = dataclasses.replace(q, tensor_scale=None)
    both = jax.jit(lambda x: (fp4jax.fake_quant(x, q), fp4jax.fake_quant(x, one_level)))
    two_levels, one_level = both(x)
    assert np.isnan(two_levels).all()
    np.testing.assert_array_equal(np.argwhere(np.isnan(one_level))[:, 0], [77] * 16)


def test_sr_under_a_ue5m3_code_of_zero_draws_the_first_step():
    q = Quantizer(E2M1, scale=SCALES["ue5m3"], rounding=SR)
    # Almost the largest amax with code 0: 6 2^-18 16/17, drawn up with 3 2^-16.
    x = jnp.full((8192, 16), 6 * 2.0**-18 * 0.94)
    codes = np.asarray(jax.jit(lambda x: fp4jax.quantize(x, q, key=KEY).codes)(x))
    assert set(np.unique(codes)) == {0, 1}
    assert codes.sum() < 30


# The tensor's amax, given.


def test_a_given_amax_stands_in_for_that_of_the_tensor():
    q = cases.NVFP4
    largest = jnp.max(jnp.abs(X))
    quantize = jax.jit(lambda amax: fp4jax.quantize(X, q, amax=amax))
    fresh = cases.everything(X)[0]["nvfp4"]
    cases.assert_same(quantize(largest), fresh)
    cases.assert_same(quantize(float(largest)), fresh)
    lower = quantize(largest / 2)
    assert lower.tensor_scale == fresh.tensor_scale / 2
    assert np.max(lower.scales) == 448  # saturates
    higher = quantize(largest * 2)
    np.testing.assert_array_equal(higher.scales * 2, fresh.scales)
    np.testing.assert_array_equal(higher.codes, fresh.codes)
    assert quantize(0.0).tensor_scale == 1
    assert np.isnan(quantize(jnp.inf).scales).all()
    rounded = largest.astype(jnp.bfloat16)
    cases.assert_same(quantize(rounded), quantize(rounded.astype(jnp.float32)))


# Random bits.


def test_same_key_same_bits_other_key_other_bits():
    once, _ = cases.everything(X, KEY)
    again, _ = cases.everything(X, KEY)
    other, _ = cases.everything(X, OTHER_KEY)
    cases.assert_same(again, once)
    for name, q in once.items():
        same = np.array_equal(q.codes, other[name].codes)
        assert same == (not q.quantizer.draws), name
        if not (q.quantizer.rotation and q.quantizer.rotation.draws):
            np.testing.assert_array_equal(q.scales, other[name].scales, err_msg=name)


def test_typed_and_raw_keys_draw_the_same():
    raw = jax.jit(lambda key: quantize_all(FEW, X, key=key))(jax.random.PRNGKey(0))
    typed, _ = cases.everything(X, jax.random.key(0))
    cases.assert_same(raw, {name: typed[name] for name in FEW})


@pytest.mark.parametrize("signs", ["per-step", "fixed"])
def test_sites_draw_their_own_bits_and_share_signs_within_a_gemm(signs):
    q = ALL["uniform-f32-rht16-sr"]
    if signs == "fixed":
        fixed = ALL["nvfp4-rht16"].rotation.signs
        q = dataclasses.replace(
            q, rotation=dataclasses.replace(q.rotation, signs=fixed)
        )
    by_site = jax.jit(
        lambda x, key: [fp4jax.quantize(x, q, key=key, site=site) for site in Site]
    )
    qs, later = by_site(X, KEY), by_site(X, OTHER_KEY)
    for a in Site:
        for b in Site:
            same_codes = np.array_equal(qs[a].codes, qs[b].codes)
            assert same_codes == (a == b)
            same_signs = np.array_equal(qs[a].signs, qs[b].signs)
            assert same_signs == (signs == "fixed" or a.signs_stream == b.signs_stream)
        assert not np.array_equal(qs[a].codes, later[a].codes)
        assert np.array_equal(qs[a].signs, later[a].signs) == (signs == "fixed")
    np.testing.assert_array_equal(qs[Site.DGRAD_DY].signs, qs[Site.DGRAD_W].signs)
    cases.assert_same(qs[0], jax.jit(lambda x: fp4jax.quantize(x, q, key=KEY))(X))


def test_stochastic_rounding_is_unbiased_over_keys():
    names = ("uniform-f32-sr", "nvfp4-sr", "nvfp4-square-sr", "uniform-f32-rht16-sr")
    keys = jax.random.split(jax.random.key(2), 4096)

    @jax.jit
    def moments(x, keys):
        values = jax.vmap(
            lambda key: cases.dequantize_all(quantize_all(some(*names), x, key=key))
        )(keys)
        return {name: (v.mean(0), v.std(0)) for name, v in values.items()}

    x = X[:2, :48]
    for name, (mean, deviation) in moments(x, keys).items():
        error = np.asarray(mean, np.float64) - np.asarray(x)
        # Elements that are members of the grid never move, but by a unit in the last
        # place; the 16 bits of a probability truncate it by up to 2^-16 of a step.
        standard_error = np.asarray(deviation) / math.sqrt(len(keys))
        assert np.all(np.abs(error) <= 4.5 * standard_error + 1e-4), name
        assert np.abs(error).mean() < 2 * standard_error.mean(), name


# Errors.

SQUARE = ALL["uniform-f32-square"]
INVALID = {
    "dtype": (
        lambda: fp4jax.quantize(jnp.ones(16, jnp.int32), ALL["nvfp4"]),
        TypeError,
        r"x must be float32, bfloat16 or float16, got dtype=int32 \(shape=\(16,\)\)",
    ),
    "dtype-fp8": (
        lambda: fp4jax.quantize(jnp.ones(16, jnp.float8_e4m3fn), ALL["nvfp4"]),
        TypeError,
        "x must be float32, bfloat16 or float16, got dtype=float8_e4m3fn",
    ),
    "quantizer": (
        lambda: fp4jax.quantize(X, E2M1),
        TypeError,
        "quantizer must be a Quantizer, got quantizer=E2M1",
    ),
    "axis": (
        lambda: fp4jax.quantize(X, ALL["nvfp4"], axis=2),
        ValueError,
        r"axis must be an integer in \[-2, 2\), got axis=2 \(shape=\(8, 72\)\)",
    ),
    "axis-negative": (
        lambda: fp4jax.quantize(X, ALL["nvfp4"], axis=-3),
        ValueError,
        r"axis must be an integer in \[-2, 2\), got axis=-3",
    ),
    "axis-float": (
        lambda: fp4jax.quantize(X, ALL["nvfp4"], axis=1.0),
        ValueError,
        r"axis must be an integer in \[-2, 2\), got axis=1.0",
    ),
    "scalar": (
        lambda: fp4jax.quantize(1.0, ALL["nvfp4"]),
        ValueError,
        r"axis must be an integer in \[0, 0\), got axis=-1 \(shape=\(\)\)",
    ),
    "other-missing": (
        lambda: fp4jax.quantize(X[None], SQUARE),
        ValueError,
        r"other must name the second axis .*=None \(shape=\(1, 8, 72\), block=\(8, 8\)",
    ),
    "other-missing-1d": (
        lambda: fp4jax.quantize(X[0], SQUARE),
        ValueError,
        r"other must name the second axis .* got other=None \(shape=\(72,\), block",
    ),
    "other-range": (
        lambda: fp4jax.quantize(X, SQUARE, other=2),
        ValueError,
        r"other must be an integer in \[-2, 2\), got other=2",
    ),
    "other-axis": (
        lambda: fp4jax.quantize(X, SQUARE, axis=1, other=-1),
        ValueError,
        "other must differ from axis, got other=1, axis=1",
    ),
    "other-of-rows": (
        lambda: fp4jax.quantize(X, ALL["nvfp4"], other=0),
        ValueError,
        "other must be None unless blocks are squares, got other=0, block=16",
    ),
    "key-rounding": (
        lambda: fp4jax.quantize(X, ALL["nvfp4-sr"]),
        ValueError,
        r"key must be a PRNG key for .*, got key=None \(rounding=Stochastic\(\), rot",
    ),
    "key-signs": (
        lambda: fp4jax.quantize(X, ALL["uniform-f32-rht16"]),
        ValueError,
        r"key must be a PRNG key for .*, got key=None \(.*, rotation=.*PerStepSigns",
    ),
    "amax-of-one-level": (
        lambda: fp4jax.quantize(X, ALL["e2m1-e4m3"], amax=2.0),
        ValueError,
        "amax must be None unless the quantizer has a tensor scale, got amax=2.0",
    ),
    "amax-shape": (
        lambda: fp4jax.quantize(X, ALL["nvfp4"], amax=jnp.ones((8, 1))),
        ValueError,
        r"amax must be a scalar, got shape=\(8, 1\)",
    ),
}


@pytest.mark.parametrize(("call", "error", "message"), INVALID.values(), ids=INVALID)
def test_errors(call, error, message):
    with pytest.raises(error, match=f"^quantize: {message}"):
        call()
    with pytest.raises(error, match=f"^quantize: {message}"):
        jax.jit(call)()
