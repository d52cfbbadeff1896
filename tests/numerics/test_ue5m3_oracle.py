"""UE5M3 under a held tensor amax: gfloat's codecs, and the formulas in float64.

G = 6 T / g,  code = ue5m3(amax_block G / 6), code 0 -> 1,  q = round(x G / code)

g is what the caller holds, not the amax of the tensor at hand.
"""

import gfloat
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gfloat import formats as gfloat_formats

import fp4jax
from fp4jax.numerics import E2M1, UE5M3, Held, Quantizer, Scale, formats
from tests.golden import inputs

f32 = np.float32
GFLOAT_UE5M3 = gfloat.FormatInfo(
    name="ue5m3",
    k=8,
    precision=4,
    bias=15,
    is_signed=False,
    domain=gfloat.Domain.Extended,
    has_nz=False,
    num_high_nans=7,
    has_subnormals=True,
    is_twos_complement=False,
)
TILES = {"1x16": 16, "16x16": (16, 16)}
# What is held over the amax at hand: right, stale either way, and so low that the
# largest blocks saturate at 61440 (137 at T = 448, 30 at 2048).
STALE = {448.0: (1, 2.5, 1 / 100, 1 / 400), 2048.0: (1, 1 / 20, 1 / 90)}
CASES = [(target, stale) for target, values in STALE.items() for stale in values]

quantize = jax.jit(fp4jax.quantize, static_argnums=1)


def rounded(x, fmt):
    """Nearest even with saturation by gfloat; its loop is over the distinct values."""
    values, where = np.unique(x, return_inverse=True)
    mode = gfloat.RoundMode.TiesToEven
    table = [gfloat.round_float(fmt, float(v), mode, sat=True) for v in values]
    return np.array(table)[where].reshape(x.shape)


def restated(x, held, target, tile, real):
    """Values, scaled elements before rounding, codes' values and 1 / G."""
    height, width = tile if isinstance(tile, tuple) else (1, tile)
    x = x.astype(real)
    rows, columns = x.shape[0] // height, x.shape[1] // width
    blocks = x.reshape(rows, height, columns, width)
    amax = np.abs(blocks).max((1, 3))
    factor = real(6 * target) / real(held)
    codes = rounded(amax * (factor * real(1 / 6)), GFLOAT_UE5M3).astype(real)
    codes = np.where(codes == 0, real(1), codes)
    inverse = real(1) / (codes * (real(1) / factor))
    t = (blocks * inverse[:, None, :, None]).reshape(x.shape)
    return rounded(t, gfloat_formats.format_info_ocp_e2m1), t, codes, 1 / factor


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("target, stale", CASES)
@pytest.mark.parametrize("name", ["normal", "ladder"])
def test_equals_gfloat_step_by_step_and_float64_but_for_ties(name, target, stale, tile):
    tile = TILES[tile]
    if name == "ladder":
        x = inputs.ladder((16, 16), (32, 128))
    else:
        x = inputs.matrix(name, "float32", (32, 128))
    held = f32(np.abs(x).max()) * f32(stale)
    quantizer = Quantizer(
        E2M1,
        block=tile,
        scale=Scale(UE5M3, pad=False),
        tensor_scale=Held(target=target),
    )
    q = quantize(jnp.asarray(x), quantizer, amax=jnp.asarray(held))
    decoded = formats.decode(q.codes, E2M1)

    values, _, codes, inverse = restated(x, held, target, tile, f32)
    np.testing.assert_array_equal(q.scales, codes)
    np.testing.assert_array_equal(q.tensor_scale, inverse)
    np.testing.assert_array_equal(decoded, values)
    assert (np.max(codes) == 61440) == (target / stale > 61440)

    values, t, exact, _ = restated(x, held, target, tile, np.float64)
    assert np.mean(codes == exact) > 0.99
    height, width = tile if isinstance(tile, tuple) else (1, tile)
    same = np.kron(codes == exact, np.ones((height, width), bool))
    differs = same & (decoded != values)
    # Float32 moves t by less than 2^-21 of itself; only a tie can flip.
    e2m1 = gfloat_formats.format_info_ocp_e2m1
    below, above = (rounded(t * (1 + r), e2m1) for r in (-(2**-21), 2**-21))
    assert np.all((decoded == below) | (decoded == above) | ~differs)
    assert np.mean(differs) < 1e-3


def test_a_block_whose_code_is_zero_rounds_to_zero():
    x = inputs.matrix("normal", "float32", (16, 64))
    x[:, :16] *= f32(2.0**-30)
    quantizer = Quantizer(E2M1, scale=Scale(UE5M3), tensor_scale=Held())
    q = quantize(jnp.asarray(x), quantizer, amax=jnp.float32(4))
    assert np.all(np.asarray(q.scales)[:, 0] == 1)
    assert np.all(np.asarray(q.codes)[:, :16] == 0)
    assert np.all(np.asarray(q.codes)[:, 16:].any(1))
