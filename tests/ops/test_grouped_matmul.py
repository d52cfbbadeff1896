"""Grouped products: what computes them, and that tiles without a group do not count."""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fp4jax import ragged_dot, recipes
from fp4jax.kernels import devices
from fp4jax.kernels.choice import KERNELS, Kernels
from fp4jax.kernels.grouped_matmul import HOPPER, Hopper
from fp4jax.kernels.tile import Tile
from fp4jax.numerics.groups import Groups
from fp4jax.ops import grouped_matmul
from tests.kernels.cases import mosaic, several_devices

OF = jnp.array([2, 0, 3, 0], jnp.int32)  # the third has no group, no group has number 1
GROUPS = Groups(OF, 3)


def integers(seed, shape):
    """Small ones, whose sums are exact."""
    drawn = jax.random.randint(jax.random.key(seed), shape, -3, 4)
    return drawn.astype(jnp.float32)


X, W, DY = integers(0, (4, 8, 5)), integers(1, (3, 5, 6)), integers(2, (4, 8, 6))
# Of each group; products with them are not exact, but rounded in one order.
FACTORS = (jnp.array([0.3, 1.7, 1.1, 0.9]), jnp.array([0.7, 1.3, 0.1, 2.3]))


def by_scan(product, *operands, factors, **how):
    """Products in XLA, of float32 sums that are exact."""
    with KERNELS(Kernels(products=grouped_matmul.SCAN)):
        return product(*operands, precision=None, factors=factors, **how)


@pytest.mark.parametrize("axis", [1, 2])
@pytest.mark.parametrize("name", ["rows", "scan_rows", "ragged_rows"])
def test_rows_are_multiplied_by_the_matrix_of_their_group(name, axis):
    w = W if axis == 1 else W.mT
    product = getattr(grouped_matmul, name)
    how = {"dtype": jnp.float32} if name == "ragged_rows" else {"precision": None}
    found = product(X, w, GROUPS, axis=axis, **how)
    for tile, group in enumerate(OF):
        expected = X[tile] @ W[group] if group < 3 else jnp.zeros((8, 6))
        np.testing.assert_array_equal(found[tile], expected)


@pytest.mark.parametrize("name", ["weights", "scan_weights", "ragged_weights"])
def test_weights_sum_over_the_tiles_of_their_group(name):
    how = {"dtype": jnp.float32} if name == "ragged_weights" else {"precision": None}
    found = getattr(grouped_matmul, name)(X, DY, GROUPS, **how)
    expected = [X[1].T @ DY[1] + X[3].T @ DY[3], jnp.zeros((5, 6)), X[0].T @ DY[0]]
    np.testing.assert_array_equal(found, jnp.stack(expected))


@pytest.mark.parametrize("name", ["rows", "ragged_rows"])
def test_rows_are_multiplied_by_the_factors_of_their_group(name):
    # NaN of the last group, which the tile without one may not see.
    factors = [factor[:3].at[2].set(jnp.nan) for factor in FACTORS]
    how = {"dtype": jnp.float32} if name == "ragged_rows" else {"precision": None}
    product = functools.partial(getattr(grouped_matmul, name), axis=1, **how)
    found = product(X, W, GROUPS, factors=factors)
    first, second = (jnp.append(factor, 1)[OF][:, None, None] for factor in factors)
    expected = product(X, W, GROUPS) * first * second
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("name", ["weights", "ragged_weights"])
def test_weights_are_multiplied_by_the_factors_of_their_group(name):
    factors = [factor[:3] for factor in FACTORS]
    how = {"dtype": jnp.float32} if name == "ragged_weights" else {"precision": None}
    product = functools.partial(getattr(grouped_matmul, name), **how)
    found = product(X, DY, GROUPS, factors=factors)
    first, second = (factor[:, None, None] for factor in factors)
    np.testing.assert_array_equal(found, product(X, DY, GROUPS) * first * second)


# Of 16 rows: a long group, short and interrupted ones, and one without tiles.
TILES = Groups(jnp.array([2] * 9 + [0, 0, 4, 0, 2, 1], jnp.int32), 4)


def hopper(**tile):
    """Kernels, interpreted where no device runs them."""
    tile = Tile(n=128, **{"stages": 2, "peers": 1, "snake": 2, **tile})
    return Hopper(bool(devices.without_wgmma()), tile)


def bfloat16(seed, *shape):
    return integers(seed, shape).astype(jnp.bfloat16)


def check_rows(kernels, axis, *, n=128, rows=16, factors=FACTORS, dtype=jnp.bfloat16):
    """Compares a kernel with the scan, of which all sums are exact."""
    x, w = bfloat16(3, TILES.of.size, rows, 128), bfloat16(4, 4, 128, n)
    x = x.at[0, 3].set(jnp.nan)  # which no other row may see
    # Nor may any that of a group without tiles, the last one.
    factors = [factor.at[3].set(jnp.nan) for factor in factors]
    w = w if axis == 1 else w.mT
    assert kernels.why_not(x, (128, n), None) is None
    how = {"axis": axis, "factors": factors, "dtype": dtype}
    found = kernels.rows(x, w, TILES, **how)
    expected = by_scan(grouped_matmul.rows, x, w, TILES, **how)
    assert found.dtype == dtype
    found, expected = (np.float32(y) for y in (found, expected))
    np.testing.assert_array_equal(found, expected)


def check_weights(kernels, *, k=128, rows=16, factors=FACTORS):
    """Likewise."""
    x, dy = bfloat16(5, TILES.of.size, rows, k), bfloat16(6, TILES.of.size, rows, 128)
    poison = (TILES.of == 2)[:, None, None]  # of one group, which no other may see
    dy = jnp.where(poison, jnp.nan, dy).astype(dy.dtype)
    found = kernels.weights(x, dy, TILES, factors=factors, dtype=jnp.float32)
    expected = by_scan(grouped_matmul.weights, x, dy, TILES, factors=factors)
    assert jnp.isnan(found[2]).all()
    np.testing.assert_array_equal(found, expected)


@pytest.fixture(name="few")
def few_programs(monkeypatch):
    """Programs that compute several tiles each."""
    monkeypatch.setattr(devices, "cores", lambda: 2)


@mosaic
@pytest.mark.parametrize("axis", [1, pytest.param(2, marks=pytest.mark.breadth)])
def test_a_kernel_multiplies_rows_where_they_lie(axis, few):
    check_rows(hopper(), axis)


@mosaic
def test_a_kernel_sums_over_whole_and_short_runs(few):
    check_weights(hopper())


@mosaic
@pytest.mark.breadth
@pytest.mark.parametrize("rows", [32, 48, 64, 128])
def test_kernels_take_tiles_of_any_rows(rows, few):
    check_rows(hopper(), 1, rows=rows, factors=(), dtype=jnp.float32)
    check_weights(hopper(), rows=rows, factors=())


@mosaic
@pytest.mark.breadth
def test_programs_that_share_tiles_load_them_together(monkeypatch):
    monkeypatch.setattr(devices, "cores", lambda: 4)
    check_rows(hopper(peers=2), 2, n=512)
    check_weights(hopper(peers=2), k=256)


@mosaic
@pytest.mark.breadth
def test_a_layer_of_groups_is_what_the_scan_makes_it(few):
    sizes, recipe = jnp.array([100, 0, 37], jnp.int32), recipes.bf16()
    x, w, dy = bfloat16(7, 140, 128), integers(8, (3, 128, 128)), bfloat16(9, 140, 128)

    def gradients():
        y, back = jax.vjp(lambda *a: ragged_dot(*a, sizes, recipe=recipe), x, w)
        return y, *back(dy.astype(y.dtype))

    expected = gradients()
    with KERNELS(Kernels(products=hopper().products)):
        found = gradients()
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_array_equal(np.float32(a), np.float32(b))


@mosaic
@pytest.mark.parametrize("peers", [1, 2])
def test_kernels_are_lowered_for_hopper(peers):
    kernels = Hopper(tile=Tile(peers=peers))
    how = {"dtype": jnp.bfloat16}

    def products(x, w, dy):
        y = kernels.rows(x, w, TILES, axis=1, **how)
        dx = kernels.rows(dy, w, TILES, axis=2, factors=FACTORS, **how)
        dw = kernels.weights(x, dy, TILES, factors=FACTORS[:1], dtype=jnp.float32)
        return y, dx, dw

    tiles = jax.ShapeDtypeStruct((TILES.of.size, 16, 512), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((4, 512, 512), jnp.bfloat16)
    lowered = jax.jit(products).trace(tiles, w, tiles)
    text = lowered.lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("custom_call @mosaic_gpu") == 3


@mosaic
@several_devices
def test_one_of_several_devices_multiplies_by_kernels():
    x = jax.ShapeDtypeStruct((TILES.of.size, 16, 128), jnp.bfloat16)
    w = jax.ShapeDtypeStruct((4, 128, 128), jnp.bfloat16)

    def rows(x, w):
        with KERNELS(Kernels(products=HOPPER)):
            return grouped_matmul.rows(x, w, TILES, axis=1, precision=None)

    lowered = jax.jit(rows).trace(x, w).lower(lowering_platforms=("cuda",))
    assert "custom_call @mosaic_gpu" in lowered.as_text()


@mosaic
@pytest.mark.parametrize(
    "shape, sizes, dtype, precision, why",
    [
        ((8, 16, 64), (64, 128), jnp.bfloat16, None, "multiples of 128, got (64, 128)"),
        ((8, 16, 128), (128, 192), jnp.bfloat16, None, "of 128, got (128, 192)"),
        ((8, 8, 128), (128, 128), jnp.bfloat16, None, "got 8 of 8"),
        ((4, 16, 128), (128, 128), jnp.bfloat16, None, "got 4 of 16"),
        ((8, 16, 128), (128, 128), jnp.float32, None, "bfloat16, got float32"),
        ((8, 16, 128), (128, 128), jnp.bfloat16, "BF16_BF16_F32", "got BF16_BF16_F32"),
    ],
)
def test_what_kernels_do_not_take(shape, sizes, dtype, precision, why):
    why_not = Hopper(interpreted=True).why_not
    x = jnp.zeros((8, 16, 128), jnp.bfloat16)
    for met in (None, "highest", lax.Precision.DEFAULT, (lax.Precision.HIGH, None)):
        assert why_not(x, (128, 128), met) is None
    assert HOPPER.why_not(x, (128, 128), None) is None
    found = why_not(jnp.zeros(shape, dtype), sizes, precision)
    assert found is not None and why in found


@mosaic
@several_devices
def test_kernels_do_not_take_what_no_rule_divides_over_devices():
    x = jnp.zeros((8, 16, 128), jnp.bfloat16)
    with jax.set_mesh(jax.make_mesh((2,), "a")):
        why = HOPPER.why_not(jax.device_put(x, jax.P("a")), (128, 128), None)
    assert why is not None and "mesh {'a': 2}" in why


@mosaic
def test_a_scan_is_logged_with_the_reason(caplog):
    grouped_matmul._say.cache_clear()  # products of other tests may have said it
    x, w = jnp.zeros((1, 16, 128), jnp.bfloat16), jnp.zeros((1, 128, 128), jnp.bfloat16)
    groups = Groups(jnp.zeros(1, jnp.int32), 1)
    with KERNELS(Kernels(products=HOPPER)), caplog.at_level("INFO"):
        for _ in range(2):
            grouped_matmul.rows(x, w, groups, axis=1, precision=None)
    (record,) = caplog.records
    assert "grouped products run as a scan in XLA: tiles must be" in record.message


@mosaic
def test_a_gpu_of_another_kind_is_named(monkeypatch):
    gpu = SimpleNamespace(platform="gpu", compute_capability="8.0", device_kind="A100")
    monkeypatch.setattr(devices, "default", lambda: gpu)
    x = jnp.zeros((8, 16, 128), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="cannot run: .* 9.0 .*'A100'"):
        HOPPER.why_not(x, (128, 128), None)
    assert Hopper(interpreted=True).why_not(x, (128, 128), None) is None


def loss(x, w):
    sizes, key = jnp.array([100, 0, 156], jnp.int32), jax.random.key(0)
    y = ragged_dot(x, w, sizes, recipe=recipes.ufp4(), key=key)
    return jnp.sum(y.astype(jnp.float32))


@mosaic
def test_kernels_of_the_context_multiply_what_they_support():
    calls = []

    def noted(name):
        def call(x, *args, **kwargs):
            calls.append((name, x.dtype))
            return getattr(HOPPER, name)(x, *args, **kwargs)

        return call

    kernels = dataclasses.replace(HOPPER, rows=noted("rows"))
    x, w = jnp.ones((256, 128), jnp.bfloat16), jnp.ones((3, 128, 256), jnp.bfloat16)
    with KERNELS(Kernels(products=grouped_matmul.SCAN)):
        scan = jax.jit(loss).trace(x, w).lower(lowering_platforms=("cuda",)).as_text()
    with KERNELS(Kernels(products=kernels)):
        lowered = jax.jit(loss).trace(x, w).lower(lowering_platforms=("cuda",))
        jax.eval_shape(loss, x[:, :40], w[:, :40])  # no whole blocks: by the scan
    assert calls == [("rows", jnp.bfloat16)]
    assert lowered.as_text().count("mosaic_gpu") > scan.count("mosaic_gpu")
