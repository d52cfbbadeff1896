"""Statistics against float64 restatements, cases computed by hand, and edge values."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp4jax
from fp4jax import stats
from fp4jax.numerics import (
    E2M1,
    E4M3,
    E8M0,
    INT2,
    UE5M3,
    UNIFORM,
    Fresh,
    Hadamard,
    Quantizer,
    Scale,
    Stochastic,
    hadamard,
)
from tests.numerics import cases

SHAPE = (16, 72)
X = cases.normal(SHAPE) * jnp.float32(0.01)
PAIRS = (stats.nmse, stats.qsnr, stats.cosine, stats.shrinkage)
OF_TENSOR = (
    stats.occupancy,
    stats.grid_use,
    stats.zero_rate,
    stats.top_rate,
    stats.nonfinite_rate,
)
OF_BOTH = (
    stats.bias,
    stats.bin_error,
    stats.geometric_bias,
    stats.saturation_rate,
    stats.scale_saturation_rate,
    stats.scale_underflow_rate,
    stats.crest_factor,
)
ONE_OF_EACH_KIND = (
    "e2m1-f32",
    "uniform-ue5m3",
    "e2m1-floor",
    "e4m3-e8m0",
    "nvfp4",
    "nvfp4-square",
    "uniform-f32-rht16",
    "e2m1-ue5m3-rht256",
    "int2-f32-sr",
)
E2M1_ROW = Quantizer(E2M1, block=4)


def name(function):
    return function.__name__


@jax.jit
def everything(x, q):
    """All statistics of an array and its quantized tensor, by name."""
    x_dq = fp4jax.dequantize(q)
    return (
        {name(f): f(x, x_dq) for f in PAIRS}
        | {name(f): f(q) for f in OF_TENSOR}
        | {name(f): f(x, q) for f in OF_BOTH}
        | {"kurtosis": stats.kurtosis(stats.rotated(x, q))}
    )


def magnitudes64(x, q):
    """|H(x)| in float64, padded, and which of its elements count."""
    x, run = np.asarray(x, np.float64), 1
    padded = np.zeros(q.codes.shape)
    padded[tuple(map(slice, x.shape))] = x
    if q.signs is not None:
        run = q.signs.size
        h = np.asarray(q.signs)[:, None] * hadamard.matrix(run) / np.sqrt(run)
        runs = np.moveaxis(padded, q.axis, -1).reshape(-1, run)
        moved = np.moveaxis(padded, q.axis, -1).shape
        padded = np.moveaxis((runs @ h).reshape(moved), -1, q.axis)
    counted = np.arange(q.codes.shape[q.axis]) < -(-x.shape[q.axis] // run) * run
    shape = [1] * x.ndim
    shape[q.axis] = -1
    return np.abs(padded), np.broadcast_to(counted.reshape(shape), padded.shape)


def restated(x, x_dq, q):
    """The same statistics in float64, from their equations."""
    x64, dq64 = np.asarray(x, np.float64), np.asarray(x_dq, np.float64)
    error = dq64 - x64
    nmse = (error**2).sum() / (x64**2).sum()
    grid = np.array(q.quantizer.grid.magnitudes)
    h, counted = magnitudes64(x, q)
    tensor_scale = 1.0 if q.tensor_scale is None else float(q.tensor_scale)
    scale = cases.spread(q.scales, q) * tensor_scale
    t = np.divide(h, scale, out=np.zeros_like(h), where=scale > 0)[counted]
    codes = np.asarray(q.codes & (1 << q.quantizer.grid.magnitude_bits) - 1)[counted]
    rho = grid[codes]
    p = np.bincount(codes, minlength=grid.size) / codes.size
    seen = p[p > 0]
    interior = np.zeros(grid.size)
    for i in range(1, grid.size - 1):
        interior[i] = (2 * grid[i] - grid[i - 1] - grid[i + 1]) / 4
    return {
        "nmse": nmse,
        "qsnr": -10 * np.log10(nmse),
        "cosine": (x64 * dq64).sum() / np.sqrt((x64**2).sum() * (dq64**2).sum()),
        "shrinkage": (x64 * dq64).sum() / (x64**2).sum(),
        "occupancy": p,
        "grid_use": np.exp(-(seen * np.log(seen)).sum()) / grid.size,
        "zero_rate": p[0],
        "top_rate": p[-1],
        "nonfinite_rate": 0.0,
        "bias": (rho - t).mean() / t.mean(),
        "bin_error": [
            (rho - t)[codes == i].mean() if (codes == i).any() else 0.0
            for i in range(grid.size)
        ],
        "geometric_bias": (p * interior).sum() / t.mean(),
        "saturation_rate": (t > grid[-1] * (1 + 2.0**-16)).mean(),
        "scale_saturation_rate": 0.0,
        "scale_underflow_rate": 0.0,
    }


@pytest.mark.parametrize("label", ONE_OF_EACH_KIND)
def test_equals_its_equation_in_float64(label):
    q, x_dq = (found[label] for found in cases.everything(X))
    found = everything(X, q)
    for statistic, expected in restated(X, x_dq, q).items():
        # The sums are float32; the bias is a small difference of large ones.
        np.testing.assert_allclose(
            found[statistic], expected, rtol=2e-5, atol=3e-6, err_msg=statistic
        )


@pytest.mark.parametrize("label", ["e2m1-f32", "nvfp4-rht16", "uniform-f32-square"])
def test_crest_factor_of_every_block(label):
    quantizer = cases.ALL[label]
    x = cases.normal((32, 64), seed=3)
    q = fp4jax.quantize(x, quantizer)
    h, _ = magnitudes64(x, q)
    b = quantizer.block_size
    a = b if quantizer.is_square else 1
    tiles = h.reshape(32 // a, a, 64 // b, b).swapaxes(1, 2)
    expected = tiles.max((2, 3)) / np.sqrt((tiles**2).mean((2, 3)))
    np.testing.assert_allclose(stats.crest_factor(x, q), expected, rtol=1e-5)


def test_kurtosis_falls_by_a_rotation():
    x = cases.normal((64, 64)).at[:, 3].multiply(jnp.float32(30))
    q = fp4jax.quantize(x, Quantizer(UNIFORM, rotation=Hadamard(16)))
    for y in (x, stats.rotated(x, q), x + jnp.float32(5)):
        y64 = np.asarray(y, np.float64)
        centered = y64 - y64.mean()
        expected = (centered**4).mean() / (centered**2).mean() ** 2
        np.testing.assert_allclose(stats.kurtosis(y), expected, rtol=1e-4)
    assert stats.kurtosis(stats.rotated(x, q)) < stats.kurtosis(x)


# Cases computed by hand.


def test_bins_of_e2m1_by_hand():
    x = jnp.array([6.0, 5.25, -2.25, 0.125])
    q = fp4jax.quantize(x, E2M1_ROW)
    assert q.scales.tolist() == [1.0]
    assert stats.occupancy(q).tolist() == [0.25, 0, 0, 0, 0.25, 0, 0, 0.5]
    assert stats.bin_error(x, q).tolist() == [-0.125, 0, 0, 0, -0.25, 0, 0, 0.375]
    total = 6 + 5.25 + 2.25 + 0.125
    assert stats.bias(x, q).item() == np.float32(0.375 / total)
    assert stats.geometric_bias(x, q).item() == np.float32(0.25 * -0.125 * 4 / total)
    entropy = -(2 * 0.25 * np.log(0.25) + 0.5 * np.log(0.5))
    np.testing.assert_allclose(stats.grid_use(q), np.exp(entropy) / 8, rtol=1e-6)
    assert stats.zero_rate(q) == 0.25 and stats.top_rate(q) == 0.5


@pytest.mark.parametrize("grid", [UNIFORM, INT2], ids=repr)
def test_uniform_grids_have_no_geometric_bias(grid):
    x = cases.normal((8, 32))
    q = fp4jax.quantize(x, Quantizer(grid, rotation=Hadamard(16)))
    assert stats.geometric_bias(x, q) == 0


def test_filling_is_not_counted():
    x = cases.normal((4, 20), seed=1)
    q = fp4jax.quantize(x, Quantizer(UNIFORM, block=16))
    assert q.codes.shape == (4, 32)
    rounded_to_zero = np.asarray(q.codes & 7)[:, :20] == 0
    np.testing.assert_allclose(stats.zero_rate(q), rounded_to_zero.mean(), rtol=1e-6)
    # The second block holds four elements: its rms is theirs.
    block = np.asarray(x[0, 16:], np.float64)
    expected = np.abs(block).max() / np.sqrt((block**2).mean())
    np.testing.assert_allclose(stats.crest_factor(x, q)[0, 1], expected, rtol=1e-6)


def test_saturation_under_a_floored_scale():
    x = jnp.array([[7.0, 6.5, 1.0, 0.0], [6.0, 5.9, 4.0, 1.0]])
    floor = dataclasses.replace(E2M1_ROW, scale=Scale(E8M0, "floor"))
    assert stats.saturation_rate(x, fp4jax.quantize(x, floor)) == 0.25
    assert stats.saturation_rate(x, fp4jax.quantize(x, E2M1_ROW)) == 0


def test_saturation_of_a_scale_by_a_stale_amax():
    quantizer = Quantizer(E2M1, block=2, scale=Scale(E4M3), tensor_scale=Fresh())
    x = jnp.array([0.75, 0.5, 3.0, 0.1, 0.2, 0.0, 0.0, 0.0])
    fresh = fp4jax.quantize(x, quantizer)
    assert fresh.scales.max() == 448 and stats.scale_saturation_rate(x, fresh) == 0
    stale = fp4jax.quantize(x, quantizer, amax=jnp.float32(1.5))
    assert stats.scale_saturation_rate(x, stale) == 0.25
    assert stats.saturation_rate(x, stale) == 0.125


def test_prescaled_elements_stay_on_the_grid():
    x = jnp.array([7.9, 4.0, 1.0, 0.0])
    scale = Scale(E8M0, "floor", prescale=0.75)
    q = fp4jax.quantize(x, dataclasses.replace(E2M1_ROW, scale=scale))
    assert stats.saturation_rate(x, q) == 0
    # 5.925, 3 and 0.75 become 6, 3 and 1.
    expected = (6 + 3 + 1) / (0.75 * 12.9) - 1
    np.testing.assert_allclose(stats.bias(x, q), expected, rtol=1e-4)


@pytest.mark.parametrize(
    "scale",
    [Scale(E4M3), Scale(UE5M3), Scale(E8M0), Scale(E8M0, "floor")],
    ids=["e4m3", "ue5m3", "e8m0", "floor"],
)
def test_underflow_of_scales_leaves_zero_blocks_out(scale):
    small = {"E4M3": 2.0**-11, "UE5M3": 2.0**-20, "E8M0": 2.0**-126}
    x = jnp.array([1.0, 0.5, small[scale.format.name], 0.0, 0.0, 0.0, 3.0, 6.0])
    q = fp4jax.quantize(x, Quantizer(E2M1, block=2, scale=scale))
    assert stats.scale_underflow_rate(x, q) == 0.25


def test_shrinkage_of_a_gemm():
    x, w = cases.normal((24, 64)), cases.normal((64, 8), seed=1)
    x_dq = fp4jax.fake_quant(x, Quantizer(INT2))
    w_dq = fp4jax.fake_quant(w, Quantizer(INT2), axis=0)
    a, b, a_dq, b_dq = (np.asarray(v, np.float64) for v in (x, w, x_dq, w_dq))
    expected = ((a @ b) * (a_dq @ b_dq)).sum() / ((a @ b) ** 2).sum()
    eta = stats.gemm_shrinkage(x, w, x_dq, w_dq)
    np.testing.assert_allclose(eta, expected, rtol=1e-6)
    assert stats.gemm_shrinkage(x, 0 * w, x, w) == 1


def test_cumulative_shrinkage():
    eta = jnp.array([0.99, 1.02, 0.5], jnp.float32)
    product, log_sum = stats.cumulative_shrinkage(eta)
    np.testing.assert_allclose(product, np.cumprod([0.99, 1.02, 0.5]), rtol=1e-6)
    np.testing.assert_allclose(log_sum, np.log(product), atol=1e-6)


def test_mismatch_of_a_transpose_by_its_equation():
    quantizer = Quantizer(E2M1, scale=Scale(E4M3), tensor_scale=Fresh())
    w = cases.normal((40, 24))
    found = stats.transpose_mismatch(w, quantizer)
    views, scales = [], []
    for v in (w, w.T):
        q = fp4jax.quantize(v, quantizer)
        scale = cases.spread(q.scales, q)[tuple(map(slice, v.shape))]
        scales.append(scale)
        views.append(np.asarray(fp4jax.dequantize(q), np.float64))
    s, s_t, a, b = scales[0], scales[1].T, views[0], views[1].T
    expected = stats.TransposeMismatch(
        scale=(s != s_t).mean(),
        scale_log2=np.abs(np.log2(s / s_t)).mean(),
        value=(a != b).mean(),
        error=np.linalg.norm(a - b) / np.linalg.norm(np.asarray(w, np.float64)),
    )
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert min(expected) > 0


def test_parts_of_a_transpose_have_the_mismatch_of_the_whole():
    quantizer = Quantizer(E2M1, scale=Scale(E4M3), tensor_scale=Fresh())
    w = cases.normal((32, 16)).at[0, 0].set(9.0)
    whole = stats.transpose_mismatch(w, quantizer)
    parts = [
        stats.transpose_mismatch(part, quantizer, amax=jnp.max(jnp.abs(w)))
        for part in (w[:16], w[16:])
    ]
    mean = np.mean([part[:3] for part in parts], axis=0)
    np.testing.assert_allclose(mean, whole[:3], rtol=1e-6)


@pytest.mark.parametrize("label", cases.SQUARES)
def test_squares_survive_a_transpose(label):
    found = stats.transpose_mismatch(cases.normal((40, 72)), cases.SQUARES[label])
    assert found == stats.TransposeMismatch(0, 0, 0, 0)


def test_held_scale():
    ratio = stats.stale_ratio(jnp.array([2.0, 3.0, 0.0]), jnp.array([1.0, 0.0, 4.0]))
    assert ratio.tolist() == [2, 1, 0]
    quantizer = Quantizer(E2M1, scale=Scale(UE5M3), tensor_scale=Fresh())
    headroom = stats.scale_headroom(ratio, quantizer)
    assert headroom.tolist() == [
        np.float32(61440 / 896),
        np.float32(61440 / 448),
        np.inf,
    ]


def test_stochastic_bias():
    keys = jax.random.split(cases.KEY, 400)
    x = cases.normal((2, 64))
    sr = Quantizer(UNIFORM, rounding=Stochastic())
    found = stats.stochastic_bias(x, sr, keys=keys)
    # Noise of one draw is at most half a step; five standard errors.
    step = np.repeat(np.abs(x).reshape(2, 4, 16).max(2) / 7, 16, 1)
    assert (np.abs(found.error) < 5 * step / 2 / 20).all()
    assert abs(found.misalignment) < 2e-3
    floor = Quantizer(E2M1, scale=Scale(E8M0, "floor"), rounding=Stochastic())
    assert stats.stochastic_bias(x, floor, keys=keys).misalignment < -2e-3
    nearest = stats.stochastic_bias(x, Quantizer(UNIFORM), keys=keys[:2])
    expected = fp4jax.fake_quant(x, Quantizer(UNIFORM))
    np.testing.assert_allclose(nearest.error, expected - x, atol=1e-7)
    alpha = stats.shrinkage(x, expected)
    np.testing.assert_allclose(nearest.misalignment, alpha - 1, atol=1e-6)


# Edge values.


@pytest.mark.parametrize("function", PAIRS, ids=name)
@pytest.mark.parametrize("unit", [2.0**-125, 2.0**-90, 2.0**90, 2.0**125])
def test_pairs_do_not_depend_on_the_unit(function, unit):
    x = jnp.clip(cases.normal((8, 32)), -3.9, 3.9)
    x = jnp.where(jnp.abs(x) < 0.5, jnp.float32(0), x)  # none subnormal
    x_dq = jnp.round(x)
    unit = np.float32(unit)
    assert function(x, x_dq) == function(x * unit, x_dq * unit)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf], ids=str)
@pytest.mark.parametrize("function", PAIRS, ids=name)
def test_pairs_of_what_is_not_finite(function, bad):
    x = cases.normal((4, 8))
    assert not jnp.isfinite(function(x.at[1, 2].set(bad), x))
    assert not jnp.isfinite(function(x.at[1, 2].set(bad), x.at[1, 2].set(jnp.nan)))


def test_pairs_of_zeros():
    zero, one = jnp.zeros((2, 3)), jnp.ones((2, 3))
    assert [f(zero, zero).item() for f in PAIRS] == [0, np.inf, 1, 1]
    assert [f(zero, one).item() for f in PAIRS] == [np.inf, -np.inf, 0, 1]
    assert [f(one, zero).item() for f in PAIRS] == [1, 0, 0, 0]


@pytest.mark.parametrize("label", ["e2m1-f32", "e2m1-e4m3", "uniform-e8m0", "nvfp4"])
def test_zeros_give_no_nan(label):
    x = jnp.zeros((4, 40))
    found = everything(x, fp4jax.quantize(x, cases.ALL[label]))
    assert all(not jnp.isnan(value).any() for value in found.values())
    assert found["zero_rate"] == 1 and found["bias"] == 0
    assert found["scale_underflow_rate"] == 0 and (found["crest_factor"] == 1).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf], ids=str)
def test_a_spoiled_block_is_counted_and_spoils_the_rest(bad):
    x = X[:, :64].at[0, 0].set(bad)
    q = fp4jax.quantize(x, Quantizer(E2M1))
    found = everything(x, q)
    assert found.pop("nonfinite_rate") == 1 / 64
    crest = found.pop("crest_factor")
    assert jnp.isnan(crest[0, 0]) and jnp.isfinite(crest).sum() == crest.size - 1
    assert all(not jnp.isfinite(value).any() for value in found.values())
    two_levels = fp4jax.quantize(x, cases.NVFP4)
    assert stats.nonfinite_rate(two_levels) == 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_narrow_dtypes_are_taken_as_float32(dtype):
    x = cases.normal((8, 32), dtype)
    q = fp4jax.quantize(x, Quantizer(UNIFORM))
    q32 = fp4jax.quantize(x.astype(jnp.float32), Quantizer(UNIFORM))
    for function in OF_BOTH:
        cases.assert_same(function(x, q), function(x.astype(jnp.float32), q32))
    x_dq = fp4jax.dequantize(q)
    for function in PAIRS:
        both = x.astype(jnp.float32), x_dq.astype(jnp.float32)
        assert function(x, x_dq) == function(*both)


def test_vmap_equals_one_by_one():
    x = cases.normal((3, 4, 32))

    @jax.jit
    def all_of(x):
        return everything(x, fp4jax.quantize(x, cases.NVFP4))

    for i, lane in enumerate(x):
        for (path, a), b in zip(
            jax.tree.leaves_with_path(jax.vmap(all_of)(x)),
            jax.tree.leaves(all_of(lane)),
            strict=True,
        ):
            # The order of float32 sums may differ.
            np.testing.assert_allclose(a[i], b, rtol=2e-5, atol=3e-6, err_msg=str(path))


def test_counts_of_many_elements_do_not_stall():
    x = jnp.ones((6 << 10, 4 << 10))  # more than 2^24
    q = fp4jax.quantize(x, Quantizer(INT2, block=1024))
    assert jax.jit(stats.top_rate)(q) == 1
    assert jax.jit(stats.nmse)(x, 2 * x) == 1


def test_errors_name_the_argument():
    x = cases.normal((2, 8))
    with pytest.raises(ValueError, match=r"qsnr: x and x_dq must have the same shape"):
        stats.qsnr(x, x[:1])
    w = jnp.ones((8, 4))
    with pytest.raises(ValueError, match="gemm_shrinkage: w and w_dq must have the"):
        stats.gemm_shrinkage(jnp.ones((2, 8)), w, jnp.ones((2, 8)), w[:, :3])
    with pytest.raises(ValueError, match=r"bias: x must be .*shape=\(2, 8\), got"):
        stats.bias(x.T, fp4jax.quantize(x, E2M1_ROW))
    with pytest.raises(ValueError, match="transpose_mismatch: w must be a matrix"):
        stats.transpose_mismatch(x[0], E2M1_ROW)
    with pytest.raises(ValueError, match="scale_headroom: quantizer must have"):
        stats.scale_headroom(1.0, E2M1_ROW)
    with pytest.raises(ValueError, match="cumulative_shrinkage: eta must be a vector"):
        stats.cumulative_shrinkage(x)


@pytest.mark.parametrize("value", [0.1, -3.3, 0.0, 1e-30])
def test_kurtosis_of_equal_numbers_is_zero(value):
    assert stats.kurtosis(jnp.full(1000, value, jnp.float32)) == 0


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf])
def test_kurtosis_of_what_is_not_finite(bad):
    x = jnp.full(3, bad, jnp.float32)
    assert jnp.isnan(stats.kurtosis(x)) and jnp.isnan(stats.kurtosis(x.at[0].set(1)))
