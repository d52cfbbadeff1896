"""The stream of random bits against mmh3, jax.random and the golden file."""

import jax
import jax.numpy as jnp
import mmh3
import numpy as np
import pytest

import fp4jax
from fp4jax.numerics import (
    E2M1,
    E4M3,
    UNIFORM,
    Fresh,
    Quantizer,
    Scale,
    Site,
    Stochastic,
    formats,
    random_bits,
)
from tests.golden import inputs

key_words = jax.jit(random_bits.key_words)
uniform16 = jax.jit(random_bits.uniform16)
quantize = jax.jit(
    fp4jax.quantize, static_argnums=1, static_argnames=("axis", "other", "site")
)


def grid(rows, columns):
    return jnp.asarray(rows, jnp.uint32)[:, None], jnp.asarray(columns, jnp.uint32)[
        None
    ]


def mmh3_bits(words, rows, columns):
    """uint32 [rows, columns]: halves of the hash of (k0, k1, row, column // 2)."""

    def bits(row, column):
        message = b"".join(
            int(w).to_bytes(4, "little") for w in (*words, row, column // 2)
        )
        return mmh3.hash(message, 0, signed=False) >> 16 * (column % 2) & 0xFFFF

    return np.array([[bits(r, c) for c in columns] for r in rows], np.uint32)


def test_bits_equal_mmh3():
    rng = np.random.default_rng(0)
    for words in ((0, 0), (1, 0), (0, 1), (2**32 - 1, 0x80000000), (12345, 67890)):
        rows, columns = (rng.integers(0, 2**32, 40).tolist() for _ in range(2))
        rows, columns = [0, 1, 2, *rows], [0, 1, 2, 3, *columns]
        bits = uniform16(tuple(map(jnp.uint32, words)), *grid(rows, columns))
        np.testing.assert_array_equal(bits, mmh3_bits(words, rows, columns))


def test_stream_is_fixed_for_good():
    golden = inputs.load("random_bits")
    for key_data, key_golden in zip(golden["keys"], golden["words"], strict=True):
        typed = jax.random.wrap_key_data(jnp.asarray(key_data))
        for stream, expected in zip(golden["streams"], key_golden, strict=True):
            for key in (typed, jnp.asarray(key_data)):
                words = key_words(key, int(stream))
                np.testing.assert_array_equal(jnp.stack(words), expected)
    words = golden["words"].reshape(-1, 2)
    positions = grid(golden["rows"], golden["columns"])
    for pair, expected in zip(words, golden["bits"], strict=True):
        bits = uniform16(tuple(jnp.asarray(pair)), *positions)
        np.testing.assert_array_equal(bits, expected)


@pytest.mark.parametrize("axis", [0, 1])
def test_rounded_codes_are_fixed_for_good(axis):
    golden = inputs.load("random_bits")
    q = quantize(
        jnp.asarray(golden["x"]),
        Quantizer(E2M1, block=4, rounding=Stochastic()),
        axis=axis,
        key=jax.random.wrap_key_data(jnp.asarray(golden["x_key"])),
        site=Site(int(golden["x_stream"])),
    )
    np.testing.assert_array_equal(q.scales, np.ones_like(q.scales))
    np.testing.assert_array_equal(q.codes, golden[f"codes_axis{axis}"])


def test_streams_of_sites():
    # A change would change every run that draws.
    assert [site.rounding_stream for site in Site] == [0, 1, 2, 3, 4, 5]
    assert [site.signs_stream for site in Site] == [8, 8, 9, 9, 10, 10]


def stochastic_members(t, u, magnitudes):
    """Float64 members of a grid: a or b of a <= t <= b as 16 bits decide."""
    t = np.minimum(np.float64(t), magnitudes[-1])
    below = np.searchsorted(magnitudes, t, side="right") - 1
    below = np.minimum(below, len(magnitudes) - 2)
    a, b = magnitudes[below], magnitudes[below + 1]
    up = np.floor((t - a) / (b - a) * 2**16).astype(np.int64) + u >= 2**16
    return np.where(up, b, a)


QUANTIZERS = {
    "e2m1": Quantizer(E2M1, rounding=Stochastic()),
    "uniform": Quantizer(UNIFORM, rounding=Stochastic()),
    "e4m3": Quantizer(E4M3, rounding=Stochastic()),
    "two-level": Quantizer(
        E2M1, scale=Scale(E4M3), tensor_scale=Fresh(448.0), rounding=Stochastic()
    ),
    "square": Quantizer(E2M1, block=(8, 8), rounding=Stochastic()),
}


@pytest.mark.parametrize(
    ("name", "shape", "axis", "other"),
    [
        ("e2m1", (32, 12), 0, None),
        ("e2m1", (3, 37, 4), 1, None),
        ("uniform", (13, 37), -1, None),
        ("e4m3", (13, 37), -1, None),
        ("two-level", (32, 12), 0, None),
        ("square", (3, 20, 4), 1, 2),
    ],
)
def test_quantize_draws_the_bits_of_the_position(name, shape, axis, other):
    quantizer = QUANTIZERS[name]
    x = inputs.bell(7, shape).astype(np.float32)
    key = jax.random.key(5)
    site = Site.WGRAD_DY
    q = quantize(jnp.asarray(x), quantizer, axis=axis, other=other, key=key, site=site)

    columns = shape[axis]
    rows = x.size // columns

    def matrix(a):
        """[free, contraction], without padding."""
        a = np.moveaxis(np.asarray(a), axis, -1)
        return a.reshape(rows, -1)[:, :columns]

    scales = np.asarray(q.scales)
    for blocked in {axis, other} - {None}:
        scales = np.repeat(scales, quantizer.block_size, blocked)
    scales = scales[tuple(slice(n) for n in q.codes.shape)]
    if q.tensor_scale is not None:
        scales = scales * np.asarray(q.tensor_scale)
    t = matrix(x) * matrix(np.float32(1) / scales)
    words = [int(w) for w in key_words(key, site.rounding_stream)]
    bits = mmh3_bits(words, range(rows), range(columns))
    members = stochastic_members(np.abs(t), bits, np.array(quantizer.grid.magnitudes))
    values = matrix(formats.decode(q.codes, quantizer.grid))
    np.testing.assert_array_equal(values, np.copysign(members, t))
