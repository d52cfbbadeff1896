import math

import jax
import jax.numpy as jnp
import pytest

from fp4jax import recipes
from fp4jax.kernels import block_sizes
from fp4jax.kernels.block_sizes import TABLE, best
from fp4jax.kernels.devices import WARPGROUP
from fp4jax.kernels.quantize import Inputs, Output, Way
from fp4jax.kernels.view import View
from tests.kernels.cases import mosaic


def test_each_device_has_all_kernels_and_the_last_entry_has_no_end():
    for sizes in (*TABLE.values(), block_sizes.ELSEWHERE):
        assert sizes.keys() == block_sizes.ELSEWHERE.keys()
        for entries in sizes.values():
            limits = [largest for largest, _ in entries]
            assert limits == sorted(limits) and limits[-1] == math.inf


def test_a_device_has_its_own_and_others_the_default(monkeypatch):
    assert best("triton_rows", 10**9) == 2  # of a CPU
    mine = {"rows": ((100, 4), (math.inf, 8))}
    monkeypatch.setattr(block_sizes, "TABLE", {"cpu": mine})
    assert [best("rows", n) for n in (99, 100, 101)] == [4, 4, 8]


@pytest.mark.parametrize("runs, width", [(4, 4), (6, 2), (3, 1), (0.5, 0)])
def test_threads_have_as_many_runs_as_there_is_room_for(runs, width, monkeypatch):
    mine = {"rows": ((math.inf, 4),), "columns": ((math.inf, 8),)}
    monkeypatch.setattr(block_sizes, "TABLE", {"cpu": mine})
    n = int(runs * WARPGROUP)
    assert View.of(jnp.zeros((n, 16)), 1).width(16) == width
    assert View.of(jnp.zeros((16, n)), 0).width(16) == width


@mosaic
@pytest.mark.parametrize(
    "name, site, outputs, axis, kernel",
    [
        ("ufp4", "dy", Output.OPERAND, 0, "columns"),
        ("nvfp4", "x", Output.OPERAND, 0, "columns"),
        ("nvfp4", "x", Output.CODES, 0, "columns_e2m1"),
        ("nvfp4", "dy", Output.OPERAND, 0, "columns_e2m1"),
        ("nvfp4", "dy", Output.OPERAND, 1, "rows"),
    ],
)
def test_what_takes_more_registers_has_an_entry(name, site, outputs, axis, kernel):
    from fp4jax.kernels.quantize import mosaic

    quantizer = getattr(getattr(recipes, name)().wgrad, site)
    assert mosaic.kernel_of(Way(quantizer, (outputs,), axis), axis) == kernel


@mosaic
@pytest.mark.parametrize("is_alone, width", [(True, 1), (False, 4)])
def test_one_kernel_for_both_axes_has_an_entry(is_alone, width, monkeypatch):
    from fp4jax.kernels.quantize import mosaic

    sizes = block_sizes.ELSEWHERE | {"rows_and_columns": ((math.inf, 4),)}
    monkeypatch.setattr(block_sizes, "TABLE", {"cpu": sizes})
    way, seen = Way(recipes.ufp4().fprop.x, (Output.OPERAND,), 1), []

    def task(x):
        _, found = mosaic._task(x, way, Inputs(), is_alone=is_alone, interpret=None)
        seen.append(found.geometry.width)

    jax.eval_shape(task, jnp.zeros((4 * WARPGROUP, 64)))
    assert seen == [width]
