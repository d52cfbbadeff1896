"""NVFP4 and four-over-six against Transformer Engine's Python reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp4jax
from fp4jax.numerics import (
    E2M1,
    E4M3,
    NVFP4_SIGNS,
    Fresh,
    Hadamard,
    Quantizer,
    Scale,
    formats,
)
from tests.golden import inputs

TILES = {"1d": 16, "2d": (16, 16)}


def nvfp4(tile, target=448.0, **options):
    return Quantizer(
        E2M1, block=tile, scale=Scale(E4M3), tensor_scale=Fresh(target), **options
    )


def golden_codes(packed, scales, tile):
    """The reference's codes under this library's two conventions.

    A negative value that rounds to 0 has code 8 there and 0 here; under a block scale
    of 0 it emits +-6, and here codes are 0.
    """
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(packed.shape[0], -1)
    height, width = tile if isinstance(tile, tuple) else (1, tile)
    dead = np.kron(scales == 0, np.ones((height, width), bool))
    return np.where(dead | (codes == 8), 0, codes)


def assert_matches(x, quantizer, golden, prefix):
    q = jax.jit(fp4jax.quantize, static_argnums=1)(x, quantizer)
    scales = golden[f"{prefix}_scales"]
    np.testing.assert_array_equal(formats.encode(q.scales, E4M3), scales)
    codes = golden_codes(golden[f"{prefix}_codes"], scales, quantizer.block)
    np.testing.assert_array_equal(q.codes, codes)
    bound = np.float32(6 * quantizer.tensor_scale.target)
    s_enc = bound / golden[f"{prefix}_amax"][0]
    np.testing.assert_array_equal(q.tensor_scale, np.float32(1) / s_enc)


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("distribution", ["normal", "heavy"])
def test_equals_transformer_engine(distribution, dtype, tile):
    golden = inputs.load(f"nvfp4_{distribution}_{dtype}")
    x = inputs.matrix(distribution, dtype)
    assert inputs.checksum(x) == golden["input_sha256"]
    assert_matches(jnp.asarray(x, dtype), nvfp4(TILES[tile]), golden, tile)


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("exponent", inputs.LADDER_EXPONENTS)
def test_equals_transformer_engine_on_tiny_and_zero_blocks(tile, exponent):
    golden = inputs.load(f"nvfp4_ladder_{tile}")
    x = inputs.ladder((16, 16) if tile == "2d" else (1, 16))
    assert inputs.checksum(x) == golden["input_sha256"]
    x = jnp.asarray(np.ldexp(x, exponent))
    assert_matches(x, nvfp4(TILES[tile]), golden, f"exp{exponent}")


def test_equals_transformer_engine_where_scales_tie():
    golden = inputs.load("nvfp4_ties")
    x = np.stack([inputs.ties(amax) for amax in inputs.TIE_AMAXES])
    assert inputs.checksum(x) == golden["input_sha256"]
    for i, matrix in enumerate(x):
        assert_matches(jnp.asarray(matrix), nvfp4(16), golden, f"{i}")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rotated_equals_transformer_engine(dtype):
    golden = inputs.load("nvfp4_rotated")
    x = inputs.lattice()
    assert inputs.checksum(x) == golden["input_sha256"]
    rotation = Hadamard(16, signs=NVFP4_SIGNS)
    quantizer = nvfp4(16, rotation=rotation)
    assert_matches(jnp.asarray(x, dtype), quantizer, golden, "rht")


FOUR_OVER_SIX = {
    "normal_float32": lambda: inputs.matrix("normal", "float32", inputs.SMALL),
    "normal_bfloat16": lambda: inputs.matrix("normal", "bfloat16", inputs.SMALL),
    "heavy_float32": lambda: inputs.matrix("heavy", "float32", inputs.SMALL),
    "heavy_bfloat16": lambda: inputs.matrix("heavy", "bfloat16", inputs.SMALL),
    "crowded": inputs.crowded,
    "ladder_1d": lambda: inputs.ladder((1, 16)),
    "ladder_2d": lambda: inputs.ladder((16, 16)),
}


def four_over_six(tile):
    scale = Scale(E4M3, pad=False, candidates=(6.0, 4.0))
    return Quantizer(E2M1, block=tile, scale=scale, tensor_scale=Fresh(256.0))


@pytest.mark.parametrize(
    "name, tile",
    [
        (name, tile)
        for name in FOUR_OVER_SIX
        for tile in TILES
        if not name.startswith("ladder") or name.endswith(tile)
    ],
)
def test_four_over_six_equals_transformer_engine(name, tile):
    golden = inputs.load(f"four_over_six_{name}")
    x = FOUR_OVER_SIX[name]()
    assert inputs.checksum(x) == golden["input_sha256"]
    x = jnp.asarray(x, "bfloat16" if "bfloat16" in name else "float32")
    assert_matches(x, four_over_six(TILES[tile]), golden, tile)


@pytest.mark.parametrize("tile", TILES)
def test_four_over_six_golden_holds_blocks_of_both_kinds(tile):
    q = fp4jax.quantize(jnp.asarray(inputs.crowded()), nvfp4(TILES[tile], 256.0))
    golden = inputs.load("four_over_six_crowded")[f"{tile}_scales"]
    assert 0.1 < np.mean(formats.encode(q.scales, E4M3) == golden) < 0.9
