"""Statistical battery of the random bits, beside threefry and hashes that are weak.

Everything is a z-score: a mean, or a correlation of two of the 16 bits or of values,
between positions, keys, steps and sites. The keys are fixed, so that a result never
changes; the bounds count how many scores there are.
"""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from fp4jax.numerics import Site, random_bits

SHAPE = (256, 1024)
# (rows, columns); columns 2j and 2j + 1 are halves of one hash.
LAGS = [(0, c) for c in (1, 2, 3, 4, 8, 16, 32, 512)]
LAGS += [(r, 0) for r in (1, 2, 3, 4, 8, 16, 32, 128)]
LAGS += [(1, 1), (1, -1), (1, 2), (2, -2), (16, 16)]
# Family-wise chance of a false alarm in one group of scores.
ALPHA = 1e-4


def positions(shape):
    row, column = (jax.lax.broadcasted_iota(jnp.uint32, shape, i) for i in (0, 1))
    return row, column


@jax.jit
def library(key, stream):
    return random_bits.uniform16(random_bits.key_words(key, stream), *positions(SHAPE))


@jax.jit
def threefry(key, stream):
    return jax.random.bits(jax.random.fold_in(key, stream), SHAPE, jnp.uint16)


@jax.jit
def without_finalizer(key, stream):
    """The library's hash, its last mixing left out."""
    h = jnp.uint32(0)
    row, column = positions(SHAPE)
    for word in (*random_bits.key_words(key, stream), row, column):
        h = random_bits._absorb(h, word)
    return h >> 16


@jax.jit
def keys_by_xor(key, stream):
    """Positions hashed well, key words mixed in by exclusive or."""
    zero = jnp.uint32(0)
    words = random_bits.key_words(key, stream)
    u = random_bits.uniform16((zero, zero), *positions(SHAPE))
    return u ^ (words[0] & 0xFFFF)


@jax.jit
def two_multiplications(key, stream):
    """Coordinates multiplied, mixed once."""
    a, b = random_bits.key_words(key, stream)
    row, column = positions(SHAPE)
    h = row * jnp.uint32(0x9E3779B1) ^ column * jnp.uint32(0x85EBCA77) ^ a
    return (h ^ (h >> 15)) * jnp.uint32(0x2C1B3C6D) + b >> 16


def spins(u):
    """The 16 bits of each element as +-1, float32 [..., 16]."""
    u = np.asarray(u).astype("<u2")
    bits = np.unpackbits(u.view(np.uint8), bitorder="little").reshape(*u.shape, 16)
    return bits * np.float32(2) - 1


def correlations(a, b):
    """Scores of all 256 pairs of bits and of the value."""
    a, b = (x.reshape(-1, 16) for x in (a, b))
    weights = np.exp2(np.arange(16, dtype=np.float32))
    weights /= np.linalg.norm(weights)
    pairs = a.T @ b
    value = (a @ weights) @ (b @ weights)
    return np.append(pairs.ravel(), value) / np.sqrt(len(a))


def means(a):
    """Scores of the mean of each bit and of the value."""
    a = a.reshape(-1, 16)
    weights = np.exp2(np.arange(16))
    weights /= np.linalg.norm(weights)
    total = a.sum(0, dtype=np.float64)
    return np.append(total, total @ weights) / np.sqrt(len(a))


def lagged(a, rows, columns):
    """An array and itself, moved."""
    if columns < 0:
        a, columns = a[:, ::-1], -columns
    n, m = a.shape[:2]
    return a[: n - rows, : m - columns], a[rows:, columns:]


STREAM = Site.DGRAD_DY.rounding_stream


def over_keys(generator):
    return [spins(generator(jax.random.key(seed), STREAM)) for seed in range(1, 6)]


def over_steps(generator):
    keys = [jax.random.fold_in(jax.random.key(0), step) for step in range(5)]
    return [spins(generator(key, STREAM)) for key in keys]


def over_sites(generator):
    key = jax.random.key(0)
    return [spins(generator(key, site.rounding_stream)) for site in Site]


def between(arrays):
    """Scores of every pair of arrays."""
    pairs = itertools.combinations(arrays, 2)
    return np.stack([correlations(*pair) for pair in pairs])


def lags(a):
    return np.stack([correlations(*lagged(a, *lag)) for lag in LAGS])


def alarms(scores):
    """The groups with a score, or a sum of squares, that chance does not give."""
    found = []
    for name, z in scores.items():
        largest = stats.norm.isf(ALPHA / 2 / z.size)
        total, count = np.sum(z**2), z.size
        low, high = stats.chi2.interval(1 - ALPHA, count)
        if np.abs(z).max() > largest or not low < total < high:
            found.append(name)
    return found


@pytest.mark.parametrize("generator", [library, threefry])
def test_generator_passes(generator):
    arrays = {
        "keys": over_keys(generator),
        "steps": over_steps(generator),
        "sites": over_sites(generator),
    }
    scores = {name: between(group) for name, group in arrays.items()}
    scores["lags"] = lags(arrays["keys"][0])
    scores["means"] = np.stack([means(a) for a in itertools.chain(*arrays.values())])
    assert alarms(scores) == []


@pytest.mark.parametrize("generator", [without_finalizer, two_multiplications])
def test_lags_reject_weak_hashes(generator):
    assert alarms({"lags": lags(spins(generator(jax.random.key(0), STREAM)))})


@pytest.mark.parametrize("generator", [without_finalizer, keys_by_xor])
@pytest.mark.parametrize("over", [over_keys, over_steps, over_sites])
def test_pairs_reject_weak_hashes(generator, over):
    assert alarms({"pairs": between(over(generator)[:3])})


@pytest.mark.parametrize("source", ["seeds", "steps", "words"])
def test_one_element_over_many_keys(source):
    """The sequence of draws of one element, over consecutive keys and even words."""
    numbers = jnp.arange(2048, dtype=jnp.uint32)

    def words(n):
        if source == "words":
            return n, jnp.uint32(0)
        seed = jax.random.key(n) if source == "seeds" else jax.random.key(0)
        return random_bits.key_words(
            seed if source == "seeds" else jax.random.fold_in(seed, n), 0
        )

    draw = jax.jit(
        jax.vmap(lambda n: random_bits.uniform16(words(n), *positions((4, 32))))
    )
    a = spins(draw(numbers)).reshape(2048, 128, 16)
    scores = {
        "lags": np.stack([correlations(*lagged(a, n, 0)) for n in (1, 2, 3, 4, 8, 64)]),
        "means": np.stack([means(a[:, i]) for i in range(128)]),
    }
    assert alarms(scores) == []


def test_values_are_uniform_and_halves_independent():
    draw = jax.jit(lambda a, b: random_bits.uniform16((a, b), *positions((2048, 2048))))
    u = np.asarray(draw(jnp.uint32(1), jnp.uint32(2)))
    counts = np.bincount(u.ravel(), minlength=2**16)
    assert ALPHA < stats.chisquare(counts).pvalue < 1 - ALPHA
    # One hash gives two halves, and one column less makes pairs of two hashes.
    for first in (0, 1):
        a, b = u[:, first:-2:2] >> 8, u[:, first + 1 : -1 : 2] >> 8
        counts = np.bincount((a * 256 + b).ravel(), minlength=2**16)
        assert ALPHA < stats.chisquare(counts).pvalue < 1 - ALPHA


def test_hashes_collide_as_often_as_random_words():
    row, column = positions((1024, 1024))
    u = np.asarray(random_bits.uniform16((jnp.uint32(3), jnp.uint32(4)), row, column))
    hashes = np.sort((u[:, ::2] | u[:, 1::2] << 16).ravel())
    collisions = np.sum(hashes[1:] == hashes[:-1])
    expected = hashes.size**2 / 2**33
    low, high = stats.poisson.interval(1 - ALPHA, expected)
    assert low <= collisions <= high


@pytest.mark.parametrize("word", range(4))
def test_each_input_bit_flips_each_output_bit_half_of_the_time(word):
    """Avalanche over the 31 or 32 bits of k0, k1, row and column // 2."""
    rng = np.random.default_rng(word)
    inputs = rng.integers(0, 2**32, (4, 4096), dtype=np.uint32)
    hashed = jax.jit(lambda m: random_bits.uniform16((m[0], m[1]), m[2], m[3]))

    def both_halves(message):
        message = message.copy()
        message[3] &= ~np.uint32(1)
        low = np.asarray(hashed(message))
        message[3] |= np.uint32(1)
        return np.concatenate([spins(low), spins(hashed(message))], -1)

    reference = both_halves(inputs)
    scores = []
    for bit in range(1 if word == 3 else 0, 32):
        flipped = inputs.copy()
        flipped[word] ^= np.uint32(1 << bit)
        agreement = np.sum(reference * both_halves(flipped), 0)
        scores.append(agreement / np.sqrt(inputs.shape[1]))
    assert alarms({"avalanche": np.stack(scores)}) == []
