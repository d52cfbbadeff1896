"""MXFP4 and MXFP8 against golden arrays of torchao, and gfloat for each named rule."""

import math

import gfloat
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gfloat import formats as gfloat_formats

import fp4jax
from fp4jax.numerics import E2M1, E4M3, E5M2, E8M0, Quantizer, Scale
from tests.golden import inputs

GRIDS = {"e2m1": E2M1, "e4m3": E4M3, "e5m2": E5M2}
RULES = ("floor", "truncation_free", "even")
# Lowest exponents of a scale: code times scale stays normal in BF16.
LOWEST = {E2M1: -125, E4M3: -117, E5M2: -110}
MATRICES = {
    "normal_float32": lambda: inputs.matrix("normal", "float32", inputs.SMALL),
    "heavy_bfloat16": lambda: inputs.matrix("heavy", "bfloat16", inputs.SMALL),
    "ladder": lambda: inputs.ladder((1, 32)),
}
GFLOAT = {
    E2M1: gfloat_formats.format_info_mxfp4_e2m1,
    E4M3: gfloat_formats.format_info_mxfp8_e4m3,
    E5M2: gfloat_formats.format_info_mxfp8_e5m2,
}

quantize = jax.jit(fp4jax.quantize, static_argnums=1)


def mx(grid, rule):
    return Quantizer(grid, block=32, scale=Scale(E8M0, rule=rule))


def unpacked(codes, grid):
    """Codes one a byte, a negative zero made positive."""
    if grid == E2M1:
        codes = np.stack([codes & 15, codes >> 4], -1).reshape(codes.shape[0], -1)
    return np.where(codes == 1 << grid.magnitude_bits, 0, codes)


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("grid", GRIDS)
@pytest.mark.parametrize("name", MATRICES)
def test_equals_torchao(name, grid, rule):
    x = MATRICES[name]()
    golden = inputs.load(f"mx_{name}")
    assert inputs.checksum(x) == golden["input_sha256"]
    dtype = "bfloat16" if "bfloat16" in name else "float32"
    q = quantize(jnp.asarray(x, dtype), mx(GRIDS[grid], rule))
    exponents = golden[f"{grid}_{rule}_scales"].astype(int) - 127
    zero = np.abs(x.reshape(x.shape[0], -1, 32)).max(-1) < 2.0**-120
    lowest = LOWEST[GRIDS[grid]]
    assert np.all((exponents < lowest) == zero)
    exponents = np.maximum(exponents, lowest)
    np.testing.assert_array_equal(q.scales, np.ldexp(np.float32(1), exponents))
    codes = unpacked(golden[f"{grid}_{rule}_codes"], GRIDS[grid])
    # Blocks of zeros and 1e-40, which there may round to an element above 0.
    codes = np.where(zero.repeat(32, 1), 0, codes)
    np.testing.assert_array_equal(q.codes, codes)


def floor(fmt, largest):
    return math.frexp(largest)[1] - 1 - fmt.emax


def truncation_free(fmt, largest):
    mantissa, exponent = math.frexp(largest / fmt.max)  # in [1/2, 1)
    # Exact: a quotient that rounds to a power of two has a dividend of equal bits.
    return exponent - (mantissa == 0.5)


def even(fmt, largest):
    """The floor of an amax rounded to the element's significant bits by gfloat."""
    mantissa, exponent = math.frexp(largest)
    significand = gfloat.FormatInfo(
        name="significand",
        k=8,
        precision=fmt.precision,
        bias=1 << (7 - fmt.precision),
        is_signed=True,
        domain=gfloat.Domain.Extended,
        has_nz=True,
        num_high_nans=0,
        has_subnormals=True,
        is_twos_complement=False,
    )
    rounded = gfloat.round_float(significand, mantissa, gfloat.RoundMode.TiesToEven)
    return math.frexp(rounded)[1] + exponent - 1 - fmt.emax


@pytest.mark.parametrize("rule", [floor, truncation_free, even])
@pytest.mark.parametrize("grid", GFLOAT, ids=repr)
def test_blocks_equal_gfloat_by_every_rule(grid, rule):
    reference = GFLOAT[grid]
    fmt = reference.etype
    rng = np.random.default_rng(5)
    x = rng.standard_t(3, (48, 32)) * np.exp2(rng.integers(-20, 20, (48, 1)))
    # Amaxes at which the rules part: 1, the largest element, what rounds up to 2.
    edges = [1, fmt.max, 2 - 2.0**-fmt.precision, 2 - 2.0**-fmt.precision - 2.0**-20]
    x[: 3 * len(edges)] /= np.abs(x[: 3 * len(edges)]).max(-1, keepdims=True)
    x[: 3 * len(edges)] *= np.ldexp(edges, [[0], [-9], [11]]).reshape(-1, 1)
    x = x.astype(np.float32)

    def scale(_, block):
        return 2.0 ** rule(fmt, np.abs(block).max())

    expected = [gfloat.quantize_block(reference, b, scale) for b in x.astype(float)]
    q = quantize(jnp.asarray(x), mx(grid, rule.__name__))
    np.testing.assert_array_equal(fp4jax.dequantize(q), np.array(expected))
