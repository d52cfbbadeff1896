"""What is measured of operands and products: hand examples, and tiles beside wholes."""

import jax
import numpy as np
import pytest

import fp4jax
from experiments.operands import cases, measure, tiles
from experiments.operands.captures import Capture
from fp4jax import Operands, stats

SHAPES = {"x": (64, 32), "w": (32, 96), "dy": (64, 96)}


def operands(seed=0):
    keys = jax.random.split(jax.random.key(seed), 3)
    arrays = (
        jax.random.normal(k, s) for k, s in zip(keys, SHAPES.values(), strict=True)
    )
    return Operands(*(x.at[3, 5].set(9.0) for x in arrays))


LAYERS = {"blocks/0/mlp/up": operands(0), "blocks/1/mlp/up": operands(1)}
TILES = tiles.Tiles(Capture(step=1, loss=0.0, layers=LAYERS))


def test_figures_of_a_product_by_hand():
    a, b = np.float32([[3, 4]]), np.float32([[1, 0]])
    a_dq = np.float32([[1.5, 2]])
    of_a, of_b, product = measure._of_product(a, b, a_dq, b)
    assert of_a["alpha - 1"] == -50 and of_a["qsnr"] == pytest.approx(6.0206, abs=1e-4)
    assert of_b["alpha - 1"] == 0 and np.isinf(of_b["qsnr"])
    assert product["eta - 1"] == -50  # 3 becomes 1.5
    assert product["qsnr"] == pytest.approx(6.0206, abs=1e-4)


def test_every_product_is_of_the_matrices_whose_rows_it_contracts():
    x, w, dy = (np.asarray(each) for each in jax.tree.leaves(operands()))
    found = measure.factors(operands(), operands())
    expected = {"fprop": x @ w, "dgrad": dy @ w.T, "wgrad": x.T @ dy}
    for gemm, (a, b) in found.items():
        np.testing.assert_allclose(
            measure.multiply(a, b), expected[gemm], rtol=1e-5, atol=1e-4
        )


def test_views_are_taken_along_the_contracted_axis():
    rows = Operands(x="x along k", w="w along n", dy="dy along n")
    columns = Operands(x="x along m", w="w along k", dy="dy along m")
    assert measure.factors(rows, columns) == {
        "fprop": ("x along k", "w along k"),
        "dgrad": ("dy along n", "w along n"),
        "wgrad": ("x along m", "dy along m"),
    }


@pytest.mark.parametrize(
    "p, used", [([1, 0], 0.5), ([0.5, 0.5], 1), ([1, 0, 0, 0], 0.25)]
)
def test_effective_share_of_the_grid(p, used):
    assert measure.effective(np.array(p)) == pytest.approx(used)


def test_tiles_are_those_of_all_tensors():
    assert TILES.size == 32 and len(TILES) == 2 * (2 + 3 + 6)
    joined = TILES.joined(TILES._tiles)
    jax.tree.map(np.testing.assert_array_equal, joined, LAYERS)


def test_tiles_are_quantized_as_their_tensors_are():
    """With a rotation and an amax, both of which are of the whole tensor's view."""
    quantizer = cases.quantizer(cases.case("E2M1", 16, "E4M3 + F32", 16))
    views = tiles.quantized(TILES, quantizer)
    path, whole = next(iter(LAYERS.items()))
    for axis, view, use in (
        (1, views.rows, views.row_use),
        (0, views.columns, views.column_use),
    ):
        q = fp4jax.quantize(whole.dy, quantizer, axis=axis)
        np.testing.assert_array_equal(view[path].dy, fp4jax.dequantize(q))
        np.testing.assert_allclose(use[path].dy, stats.occupancy(q), rtol=1e-6)


def test_crest_and_kurtosis_are_those_of_the_tensor():
    quantizer = cases.quantizer(cases.case("UNIFORM"))
    found = measure.distributions(TILES, quantizer)["fprop"]["x"]
    x = LAYERS["blocks/1/mlp/up"].x
    crest = stats.crest_factor(x, fp4jax.quantize(x, quantizer))
    assert found["crest"][1] == pytest.approx(np.median(crest), abs=1e-3)
    assert found["kurtosis"][1] == pytest.approx(stats.kurtosis(x).item(), abs=1e-3)


def test_every_case_is_a_quantizer_of_its_own():
    named = [*cases.main_cases(), *cases.more_cases()]
    quantizers = {tuple(case.values()): cases.quantizer(case) for case in named}
    assert len(set(quantizers.values())) == len(quantizers) > 100
