"""Products of a packed operand: decoded to the same bits, and multiplied exactly."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from fp4jax.kernels import devices
from fp4jax.kernels.choice import KERNELS, Kernels
from fp4jax.kernels.quantize import Inputs, Output, Quantized, Way, Written, reference
from fp4jax.kernels.scaled_matmul import api, decode, scaled_matmul
from fp4jax.kernels.scaled_matmul.backends import Mosaic
from fp4jax.kernels.tile import Tile
from fp4jax.numerics import (
    E2M1,
    E4M3,
    E8M0,
    F32,
    UE5M3,
    UNIFORM,
    Hadamard,
    Quantizer,
    Scale,
    formats,
    packing,
)
from fp4jax.numerics.blocks import Tiling
from tests.kernels.cases import mosaic, several_devices

GRIDS = [g for g in formats.GRIDS if packing.fits_half_a_byte(g)]
BYTES = [f for f in formats.SCALE_FORMATS if f != F32]
# Interpreted where no device runs them.
SMALL = Mosaic(bool(devices.without_wgmma()), Tile(n=64, stages=2))

QUANTIZERS = {
    "e4m3": Quantizer(E2M1, 16, Scale(E4M3)),
    "ue5m3": Quantizer(UNIFORM, 16, Scale(UE5M3), rotation=Hadamard(16)),
    "f32": Quantizer(UNIFORM, 16),
    "mx": Quantizer(E2M1, 32, Scale(E8M0)),
    "squares": Quantizer(E2M1, (32, 32), Scale(E8M0)),
}


def packed(quantizer, axis, shape=(64, 128), seed=0):
    """Integers times powers of two, packed along an axis."""
    keys = jax.random.split(jax.random.key(seed))
    x = jax.random.randint(keys[0], shape, -6, 7) * 1.0
    x = x * 2.0 ** jax.random.randint(keys[1], shape, -3, 4)
    other = 1 - axis if quantizer.is_square else None
    way = Way(quantizer, (Output.CODES, Output.SCALES), axis, other)
    tiling = Tiling(shape, dict.fromkeys(way.axes, quantizer.block_size))
    found = reference.quantize(x, way, Inputs())
    return Written(found, quantizer, tiling, axis, axis)


def integers(shape):
    return jax.random.randint(jax.random.key(9), shape, -3, 4).astype(jnp.bfloat16)


def halves(words):
    return lax.bitcast_convert_type(words, jnp.bfloat16).reshape(len(words), -1)


@pytest.mark.parametrize("fmt", BYTES, ids=str)
@pytest.mark.parametrize("grid", GRIDS, ids=str)
def test_every_byte_and_every_scale_are_decoded_to_the_same_bits(grid, fmt):
    # No quantizer writes others of E8M0 for such codes, nor more bits than they have.
    some = [0, *range(2, 253)] if fmt == E8M0 else range(fmt.nan_code)
    nan = [fmt.nan_code] * (256 - len(some))
    scales = jnp.array([*some, *nan], jnp.uint8)
    half = (2 << grid.magnitude_bits) - 1
    codes = jnp.arange(256, dtype=jnp.uint8) & jnp.uint8(half << 4 | half)
    words = decode.scale_words(scales.astype(jnp.uint32)[:, None], fmt, grid)
    found = decode.elements(codes.astype(jnp.uint32)[None], words, grid, halves)
    values = formats.decode(packing.unpack(codes), grid)[None]
    expected = values * formats.decode_magnitude(scales, fmt)[:, None]
    found, expected = np.asarray(found, np.float32), np.asarray(expected)
    assert all(np.isnan(x[len(some) :]).all() for x in (found, expected))
    bits = [x[: len(some)].view(np.uint32) for x in (found, expected)]
    np.testing.assert_array_equal(*bits)


def held(layout, shape):
    """Row and column of what threads hold: [2, warp, lane, register, element]."""
    x = np.arange(np.prod(shape)).reshape(shape)
    for tile in layout.mosaic.tiling.tiles:
        lead = x.ndim - len(tile)
        sizes = [
            n for d, t in zip(x.shape[lead:], tile, strict=True) for n in (d // t, t)
        ]
        x = x.reshape(*x.shape[:lead], *sizes)
        x = x.transpose(
            *range(lead), *range(lead, x.ndim, 2), *range(lead + 1, x.ndim, 2)
        )
    x = np.moveaxis(x, (*layout.mosaic.warp_dims, *layout.mosaic.lane_dims), range(3))
    x = x.reshape(4, 32, -1, layout.mosaic.vector_length)
    return np.stack(np.unravel_index(x, shape))


@mosaic
def test_every_thread_has_the_bytes_of_its_elements():
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from fp4jax.kernels.scaled_matmul import fragments

    assert fragments.ELEMENTS.pallas.to_mgpu() == plgpu.Layout.WGMMA.to_mgpu()
    rows, columns = held(fragments.ELEMENTS, (64, 64))
    of_bytes = held(fragments.BYTES, (64, 32))
    np.testing.assert_array_equal(of_bytes, [rows[..., :1], columns[..., :1] // 2])
    np.testing.assert_array_equal(columns[..., 1], columns[..., 0] + 1)
    down = held(fragments.BYTES_DOWN, (32, 64))
    np.testing.assert_array_equal(down[::-1], of_bytes)


def check(name, axis, other_axis, side, m=128, dtype=jnp.float32):
    """Compares a kernel with the reference, of which all sums are exact."""
    backend, factors = SMALL, (jnp.float32(3), jnp.float32(0.5))
    a = packed(QUANTIZERS[name], axis, (128, m) if axis == 0 else (m, 128))
    b = integers((128, 64) if other_axis == 0 else (64, 128))
    how = {"axis": other_axis, "side": side, "factors": factors, "dtype": dtype}
    with KERNELS(Kernels(scaled_matmul=backend)):
        found = scaled_matmul(a, b, **how)
    expected = scaled_matmul(a, b, **how)
    assert backend.why_not(a, b, axis=other_axis, dtype=dtype) is None
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, expected)


@mosaic
def test_the_kernel_equals_the_reference():
    check("e4m3", 0, 0, "lhs")


@mosaic
@pytest.mark.parametrize("side", ["lhs", "rhs"])
def test_programs_that_share_columns_load_them_together(side, monkeypatch):
    monkeypatch.setattr(devices, "cores", lambda: 2)  # of four rows of tiles
    check("e4m3", 0, 0, side, m=512)


@mosaic
@pytest.mark.parametrize(
    "name, axis, other_axis, side",
    [
        ("e4m3", 1, 1, "rhs"),
        ("ue5m3", 0, 1, "lhs"),
        ("f32", 1, 0, "lhs"),
        ("mx", 0, 0, "rhs"),
        ("squares", 1, 1, "rhs"),
    ],
)
def test_every_kernel_equals_the_reference(name, axis, other_axis, side):
    check(name, axis, other_axis, side, dtype=jnp.bfloat16)


@mosaic
@pytest.mark.parametrize(
    "name, axis, other_axis, side",
    [("e4m3", 0, 0, "lhs"), ("f32", 1, 1, "rhs")],
)
def test_lowers_for_cuda(name, axis, other_axis, side):
    a = packed(QUANTIZERS[name], axis, (128, 128))
    b = integers((128, 256) if other_axis == 0 else (256, 128))

    @jax.jit
    def multiply(b):
        return Mosaic().multiply(
            a, b, axis=other_axis, side=side, factors=(), dtype=jnp.bfloat16
        )

    assert multiply.eval_shape(b).shape == ((128, 256) if side == "lhs" else (256, 128))
    lowered = multiply.trace(b).lower(lowering_platforms=("cuda",))
    assert "mosaic_gpu" in lowered.as_text()


@mosaic
def test_lanes_are_multiplied_in_turn():
    a, b = packed(QUANTIZERS["e4m3"], 0), integers((2, 64, 64))
    multiply = functools.partial(scaled_matmul, a, axis=0)
    with KERNELS(Kernels(scaled_matmul=SMALL)):
        found = jax.vmap(multiply)(b)
    np.testing.assert_array_equal(found, jax.vmap(multiply)(b))


def zeros(quantizer=QUANTIZERS["e4m3"], shape=(64, 128)):
    """What is asked for its quantizer and shape alone."""
    tiling = Tiling(shape, {0: quantizer.block_size})
    arrays = {
        Output.CODES: jnp.zeros((shape[0] // 2, shape[1]), jnp.uint8),
        Output.SCALES: jnp.zeros((shape[0] // quantizer.block_size, shape[1]), "uint8"),
    }
    return Written(Quantized(arrays, None, None), quantizer, tiling, 0, 0)


@mosaic
def test_says_what_it_cannot_do():
    b = jnp.ones((64, 64), jnp.bfloat16)

    a = zeros()

    def why(a=a, b=b, backend=SMALL, dtype=jnp.float32):
        return backend.why_not(a, b, axis=0, dtype=dtype)

    assert why() is None
    assert "multiples of 128, 64 and 64, got 128, 8 and 64" in why(b=b[:, :8])
    assert "must have 32 elements" in why(b=b[:32])
    assert "must be bfloat16, got float32" in why(b=b.astype(jnp.float32))
    assert "bfloat16 or float32, got float16" in why(dtype=jnp.float16)
    assert "matrices" in why(b=b[None])
    assert "4 bits" in why(zeros(Quantizer(E4M3, 32, Scale(E8M0))))
    assert "got 128" in why(zeros(Quantizer(E2M1, 128), (128, 128)))


@mosaic
@several_devices  # of which any may have the array
def test_says_that_it_cannot_divide_its_work(monkeypatch):
    monkeypatch.setattr(devices, "without_wgmma", lambda: None)
    b = jnp.ones((64, 64), jnp.bfloat16)
    why = Mosaic().why_not(zeros(), b, axis=0, dtype=jnp.float32)
    assert "several devices" in why


def test_a_tile_is_as_deep_as_the_product_allows():
    tile = Tile(n=128, k=128, stages=2, peers=2)
    found = [Mosaic(True, tile)._tile(256, 128, k) for k in (256, 192)]
    assert [(t.k, t.stages) for t in found] == [(128, 2), (64, 4)]


no_kernel = pytest.mark.skipif(not devices.without_wgmma(), reason="it runs here")


@no_kernel
def test_a_named_implementation_never_falls_back():
    b = jnp.ones((64, 64), jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="'mosaic' cannot do this: .* got"):
        scaled_matmul(zeros(), b, axis=0, implementation="mosaic")
    with pytest.raises(ValueError, match="one of mosaic, xla or None"):
        scaled_matmul(zeros(), b, axis=0, implementation="triton")


def test_what_is_no_packed_operand_and_no_side_is_refused():
    b = jnp.ones((64, 64), jnp.bfloat16)
    with pytest.raises(ValueError, match="side must be 'lhs' or 'rhs', got side='l'"):
        scaled_matmul(zeros(), b, axis=0, side="l")
    with pytest.raises(TypeError, match="packed must be Written with codes and scales"):
        scaled_matmul(b, b, axis=0)


@no_kernel
def test_what_the_chosen_one_cannot_do_is_left_to_xla_and_said(caplog):
    api._say.cache_clear()
    with caplog.at_level("INFO"), KERNELS(Kernels(scaled_matmul=Mosaic())):
        multiply = functools.partial(scaled_matmul, zeros(), axis=0)
        y = jax.eval_shape(multiply, jnp.ones((64, 64), jnp.bfloat16))
    assert (y.shape, y.dtype) == ((128, 64), jnp.bfloat16)
    assert "scaled_matmul runs in XLA: " in caplog.text
