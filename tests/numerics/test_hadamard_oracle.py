"""The random Hadamard transform against scipy, float64 and plain numpy float32."""

import struct

import jax
import jax.numpy as jnp
import mmh3
import numpy as np
import pytest
import scipy.linalg

import fp4jax
from fp4jax.numerics import (
    E2M1,
    NVFP4_SIGNS,
    FixedSigns,
    Hadamard,
    PerStepSigns,
    Quantizer,
    Site,
    formats,
    hadamard,
)
from tests.golden import inputs

rotate = jax.jit(hadamard.rotate, static_argnums=2)
rotate_back = jax.jit(hadamard.rotate_back, static_argnums=2)


def signs_of(size, seed=3):
    return np.where(inputs.bell(seed, (size,)) < 0, -1, 1).astype(np.float32)


def transform(size, signs):
    """diag(eps) H / sqrt(n) in float64."""
    return signs[:, None] * scipy.linalg.hadamard(size) / np.sqrt(size)


def rotated(x, signs, axis=-1):
    """Float64 result for an array whose axis is a multiple of n."""
    x = np.moveaxis(x.astype(np.float64), axis, -1)
    runs = x.reshape(*x.shape[:-1], -1, len(signs)) @ transform(len(signs), signs)
    return np.moveaxis(runs.reshape(x.shape), -1, axis)


@pytest.mark.parametrize("size", [2, 4, 8, 16, 32, 64, 128, 256])
def test_matrix_is_sylvesters(size):
    np.testing.assert_array_equal(hadamard.matrix(size), scipy.linalg.hadamard(size))


@pytest.mark.parametrize("size", [2, 16, 256])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_rotates_unit_vectors_to_rows_of_the_transform(size, dtype):
    signs = signs_of(size)
    out = rotate(jnp.eye(size, dtype=dtype), signs, 1)
    expected = transform(size, signs).astype(np.float32)
    np.testing.assert_array_equal(out, expected)
    back = rotate_back(out, signs, 1)
    np.testing.assert_allclose(back, np.eye(size), rtol=0, atol=1e-6)


@pytest.mark.parametrize("size", [2, 16, 128])
def test_float32_sums_are_in_the_stated_order(size):
    signs = signs_of(size)
    x = inputs.matrix("heavy", "float32", (8, 512))
    runs = x.reshape(8, -1, size) * signs
    distance = 1
    while distance < size:
        pairs = runs.reshape(8, 512 // size, -1, 2, distance)
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        runs = np.stack([a + b, a - b], -2).reshape(8, -1, size)
        distance *= 2
    expected = runs.reshape(x.shape) * np.float32(1 / np.sqrt(size))
    np.testing.assert_array_equal(rotate(jnp.asarray(x), signs, 1), expected)


@pytest.mark.parametrize("axis", [0, 1, -1])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_any_axis_equals_float64(axis, dtype):
    signs = signs_of(16)
    x = np.float32(inputs.lattice((32, 48, 64)))
    out = rotate(jnp.asarray(x, dtype), signs, axis)
    # Sums of a lattice are exact, and so is the division by 4.
    np.testing.assert_array_equal(out, rotated(x, signs, axis))


@pytest.mark.parametrize("size", [16, 128])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_preserves_products(size, dtype):
    signs = signs_of(size)
    x = inputs.matrix("normal", dtype, (24, 512), 1)
    w = inputs.matrix("normal", dtype, (40, 512), 2)
    x_rotated, w_rotated = (
        np.float64(rotate(jnp.asarray(a, dtype), signs, 1)) for a in (x, w)
    )
    product = np.float64(x) @ np.float64(w).T
    scale = np.linalg.norm(x, axis=1)[:, None] * np.linalg.norm(w, axis=1)
    # log2(n) additions and one product, each off by at most 2^-24, on both sides.
    bound = 2 * (np.log2(size) + 2) * 2.0**-24
    assert np.max(np.abs(x_rotated @ w_rotated.T - product) / scale) < bound
    norms = np.linalg.norm(x_rotated, axis=1) / np.linalg.norm(x, axis=1)
    np.testing.assert_allclose(norms, 1, rtol=bound)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_quantize_rotates_pads_and_rotates_back(dtype):
    quantizer = Quantizer(E2M1, rotation=Hadamard(16, signs=NVFP4_SIGNS))
    x = inputs.lattice((8, 40))
    q = jax.jit(fp4jax.quantize, static_argnums=1)(jnp.asarray(x, dtype), quantizer)
    signs = np.array(NVFP4_SIGNS)
    padded = rotated(np.pad(x, ((0, 0), (0, 8))), signs)
    amax = np.abs(padded).reshape(8, 3, 16).max(-1)
    np.testing.assert_array_equal(q.scales, np.float32(amax) * np.float32(1 / 6))
    decoded = np.float64(formats.decode(q.codes, E2M1))
    rounded = decoded * np.repeat(np.float64(q.scales), 16, 1)
    # Elements are off by at most half the largest step, 1, times the scale.
    assert np.all(np.abs(rounded - padded) <= np.repeat(amax / 6, 16, 1) * (1 + 1e-6))
    h = transform(16, signs)
    expected = (rounded.reshape(8, 3, 16) @ h.T).reshape(8, 48)[:, :40]
    x_dq = np.float64(jax.jit(fp4jax.dequantize)(q))
    tolerance = 2.0**-8 if dtype == "bfloat16" else 2.0**-20
    np.testing.assert_allclose(x_dq, expected, rtol=tolerance, atol=1e-5)


def test_drawn_signs_come_from_the_random_bits():
    for seed in (0, 1, 2**32 - 1):
        drawn = hadamard.sign_vector(Hadamard(64, signs=FixedSigns(seed)), None, 0)
        messages = [struct.pack("<4I", seed, 0, 0, pair) for pair in range(32)]
        hashes = [mmh3.hash(message, 0, signed=False) for message in messages]
        u = np.array([(h & 0xFFFF, h >> 16) for h in hashes]).ravel()
        np.testing.assert_array_equal(drawn, np.where(u < 2**15, 1, -1))


def test_signs_of_each_step_are_balanced_and_shared_by_a_gemm():
    rotation = Hadamard(256, signs=PerStepSigns())
    keys = jax.vmap(jax.random.key)(jnp.arange(64))
    stream = Site.WGRAD_X.signs_stream
    assert stream == Site.WGRAD_DY.signs_stream
    draw = jax.jit(jax.vmap(lambda key: hadamard.sign_vector(rotation, key, stream)))
    signs = np.asarray(draw(keys))
    assert set(np.unique(signs)) == {-1, 1}
    # 64 x 256 fair signs: the mean of all within 4 deviations, of a column within 5.
    assert abs(signs.mean()) < 4 / np.sqrt(signs.size)
    assert np.abs(signs.mean(0)).max() < 5 / np.sqrt(64)
    agreement = signs @ signs.T / 256 - np.eye(64)
    assert np.abs(agreement).max() < 5 / np.sqrt(256)
