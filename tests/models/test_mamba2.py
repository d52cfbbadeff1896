"""The Mamba-2 layer against its formula, and where documents begin."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fp4jax import recipes
from fp4jax.models import MambaConfig
from fp4jax.models.mamba2 import Mamba2, count_documents
from tests.cases import SMALL

SHAPE = MambaConfig(num_heads=4, head_dim=8, d_state=6, num_groups=2, chunk=4)
CONFIG = dataclasses.replace(SMALL, blocks="M", mamba=SHAPE)
BF16 = {f"mamba/{site}": recipes.bf16() for site in ("input", "output")}
DOCUMENTS = [0] * 6 + [1] * 5


def silu(x):
    return x / (1 + np.exp(-x))


def by_token(layer, u, documents):
    """The layer of one row, one token after another, of float64 numpy arrays."""
    get = lambda param: np.asarray(param[...], np.float64)
    z, mixed, dt = np.split(
        np.asarray(layer.input(u), np.float64)[0], (32, 88), axis=-1
    )
    dt = np.log1p(np.exp(dt + get(layer.dt_bias)))
    state, rows, last = np.zeros((4, 6, 8)), [], None
    for t, document in enumerate(documents):
        lags = [i for i in range(4) if t >= i and documents[t - i] == document]
        conv = sum(get(layer.conv.taps)[i] * mixed[t - i] for i in lags)
        x, b, c = np.split(silu(conv + get(layer.conv.bias)), (32, 44))
        x = x.reshape(4, 8)
        b, c = (each.reshape(2, 6).repeat(2, axis=0) for each in (b, c))
        if document != last:
            state[:] = 0
        last = document
        kept = np.exp(-dt[t] * np.exp(get(layer.a_log)))[:, None, None]
        state = kept * state + np.einsum("h,hn,hp->hnp", dt[t], b, x)
        y = np.einsum("hn,hnp->hp", c, state) + get(layer.skip)[:, None] * x
        y = (y.reshape(-1) * silu(z[t])).reshape(2, 16)
        y /= np.sqrt((y**2).mean(axis=-1, keepdims=True) + CONFIG.norm_eps)
        rows.append(y.reshape(-1) * get(layer.norm.scale))
    return np.stack(rows) @ get(layer.output.kernel)


def test_mamba2_equals_its_formula():
    layer = Mamba2(CONFIG, BF16, rngs=nnx.Rngs(0))
    for seed, param in enumerate((layer.skip, layer.norm.scale, layer.conv.bias)):
        param[...] += jax.random.normal(jax.random.key(seed), param.shape)
    u = jax.random.normal(jax.random.key(9), (1, 11, 32)).astype(jnp.bfloat16)
    y = nnx.jit(lambda layer, u: layer(u, documents=jnp.array([DOCUMENTS])))(layer, u)
    expected = by_token(layer, u, DOCUMENTS)
    # A few roundings to bfloat16 on the way.
    error = np.linalg.norm(y[0].astype(jnp.float32) - expected)
    assert error < 2**-7 * np.linalg.norm(expected)


def test_rates_and_steps_start_in_their_ranges():
    layer = Mamba2(CONFIG, BF16, rngs=nnx.Rngs(0))
    rates = np.exp(layer.a_log[...])
    steps = np.log1p(np.exp(layer.dt_bias[...]))
    assert ((1 <= rates) & (rates <= 16)).all() and np.ptp(rates) > 1
    assert ((0.999e-3 <= steps) & (steps <= 0.101)).all() and np.ptp(steps) > 0.01


def test_documents_are_counted_along_rows():
    ids = jnp.array([[7, 7, 3, 3, 7, 0], [1, 1, 1, 1, 1, 1]])
    expected = [[0, 0, 1, 1, 2, 3], [0] * 6]
    np.testing.assert_array_equal(count_documents(ids), expected)
