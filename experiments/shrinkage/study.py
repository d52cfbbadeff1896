"""Measures the cases, all figures in percent, decibels and plain numbers."""

import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from experiments.shrinkage import cases, inputs
from experiments.shrinkage.cases import TOLERANCE, Case
from fp4jax import dequantize, fake_quant, quantize, stats
from fp4jax.numerics import Quantizer

Figures = dict[str, float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Shapes of the arrays: of distributions, of views, and m, k, n of the GEMM."""

    array: tuple[int, int] = (4096, 1024)
    matrix: tuple[int, int] = (2048, 2048)
    gemm: tuple[int, int, int] = (512, 2048, 512)


TINY = Sizes(array=(256, 1024), matrix=(256, 256), gemm=(64, 512, 64))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
    """What was measured of a case.

    Attributes:
      case: what was quantized how.
      figures: by name.
      bin_error: of each magnitude of the grid, in grid units; of the section "data".
    """

    case: Case
    figures: Figures
    bin_error: tuple[float, ...] = ()

    @property
    def off(self) -> Figures:
        """The figures beyond their tolerance, and by how much they miss."""
        missed = {
            name: self.figures[name] - value
            for name, value in self.case.expected.items()
        }
        return {n: miss for n, miss in missed.items() if abs(miss) > TOLERANCE[n]}


def run(sizes: Sizes, *, seed: int) -> Iterator[Row]:
    """Yields a row for every case, in the order of the tables."""
    key = jax.random.key(seed)
    for case in cases.data_cases() + cases.scale_cases():
        x = _array(case.data, sizes.array, seed)
        found = jax.device_get(_of_array(x, case.quantizer, key))
        errors = tuple(found.pop("bin_error").tolist())
        yield Row(case=case, figures=_floats(found), bin_error=errors)
    for case in cases.view_cases():
        found = _of_views(_array(case.data, sizes.matrix, seed), case.quantizer)
        yield Row(case=case, figures=_floats(found))
    m, k, n = sizes.gemm
    x, w = _array("gauss", (m, k), seed), _array("gauss", (k, n), seed + 1)
    for case in cases.gemm_cases():
        found = _of_gemm(x, w, case.quantizer)
        yield Row(case=case, figures=_floats(found))


@functools.lru_cache(maxsize=1)
def _array(data: str, shape: tuple[int, int], seed: int) -> jax.Array:
    return jnp.asarray(inputs.draw(data, shape, seed=seed))


def _floats(found: dict[str, jax.Array]) -> Figures:
    """Returns plain numbers, in the order of `TOLERANCE`; a traced dict is sorted."""
    return {name: float(found[name]) for name in TOLERANCE if name in found}


@functools.partial(jax.jit, static_argnames="quantizer")
def _of_array(x: jax.Array, quantizer: Quantizer, key: jax.Array):
    q = quantize(x, quantizer, key=key)
    x_dq = dequantize(q)
    return {
        "alpha - 1": 100 * (stats.shrinkage(x, x_dq) - 1),
        "bias": 100 * stats.bias(x, q),
        "geometric": 100 * stats.geometric_bias(x, q),
        "QSNR": stats.qsnr(x, x_dq),
        "B_eff": stats.grid_use(q),
        "crest": jnp.median(stats.crest_factor(x, q)),
        "saturated": 100 * stats.saturation_rate(x, q),
        "bin_error": stats.bin_error(x, q),
    }


@functools.partial(jax.jit, static_argnames="quantizer")
def _of_views(w: jax.Array, quantizer: Quantizer):
    found = stats.transpose_mismatch(w, quantizer)
    size = quantizer.block_size
    squares = dataclasses.replace(quantizer, block=(size, size))
    return {
        "scale differs": 100 * found.scale,
        "value differs": 100 * found.value,
        "view error": found.error,
        "QSNR": stats.qsnr(w, fake_quant(w, quantizer)),
        "QSNR of squares": stats.qsnr(w, fake_quant(w, squares)),
    }


@functools.partial(jax.jit, static_argnames="quantizer")
def _of_gemm(x: jax.Array, w: jax.Array, quantizer: Quantizer):
    x_dq, w_dq = fake_quant(x, quantizer), fake_quant(w, quantizer, axis=0)
    y, y_dq = (
        jnp.matmul(a, b, precision=jax.lax.Precision.HIGHEST)
        for a, b in ((x, w), (x_dq, w_dq))
    )
    return {
        "eta - 1": 100 * (stats.gemm_shrinkage(x, w, x_dq, w_dq) - 1),
        "output error": jnp.sqrt(stats.nmse(y, y_dq)),
    }
