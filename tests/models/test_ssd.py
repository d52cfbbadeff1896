"""The chunked scan against the recurrence, one token after another, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fp4jax.models.ssd import ssd

ROWS, HEADS, CHANNELS, GROUPS, STATE = 2, 4, 3, 2, 5


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def draw(length, *, documents=1, seed=0):
    rng = np.random.default_rng(seed)
    normal = lambda *shape: jnp.asarray(rng.standard_normal((ROWS, length, *shape)))
    starts = rng.random((ROWS, length)) < (documents - 1) / length
    operands = (
        normal(HEADS, CHANNELS),
        jnp.exp(normal(HEADS)),
        -jnp.asarray(rng.uniform(0.01, 2, HEADS)),
        normal(GROUPS, STATE),
        normal(GROUPS, STATE),
    )
    return operands, jnp.asarray(np.cumsum(starts, axis=1), jnp.int32)


def recurrence(x, dt, a, b, c, *, documents):
    b, c = (jnp.repeat(each, HEADS // GROUPS, axis=2) for each in (b, c))
    starts = jnp.diff(documents, axis=1, prepend=-1) != 0

    def step(state, token):
        x, dt, b, c, starts = token
        state = jnp.where(starts[:, None, None, None], 0, state)
        kept = jnp.exp(dt * a[None])[..., None, None]
        state = kept * state + jnp.einsum("bh,bhn,bhp->bhnp", dt, b, x)
        return state, jnp.einsum("bhn,bhnp->bhp", c, state)

    tokens = jax.tree.map(lambda v: jnp.moveaxis(v, 1, 0), (x, dt, b, c, starts))
    start = jnp.zeros((ROWS, HEADS, STATE, CHANNELS))
    return jnp.moveaxis(jax.lax.scan(step, start, tokens)[1], 0, 1)


@pytest.mark.parametrize(
    ("length", "chunk", "documents"),
    [(32, 8, 1), (37, 8, 1), (5, 8, 1), (61, 16, 6), (64, 8, 30)],
    ids=["whole chunks", "a part of one", "less than one", "packed", "short documents"],
)
def test_chunks_equal_the_recurrence_and_so_do_their_gradients(
    length, chunk, documents
):
    operands, documents = draw(length, documents=documents)
    weights = jnp.asarray(np.random.default_rng(1).standard_normal(operands[0].shape))

    def results(scan):
        def loss(*operands):
            y = scan(*operands)
            return jnp.sum(jnp.sin(y) * weights), y

        gradient = jax.value_and_grad(loss, argnums=range(5), has_aux=True)
        return jax.jit(gradient)(*operands)

    ours = results(lambda *o: ssd(*o, documents=documents, chunk=chunk))
    reference = results(lambda *o: recurrence(*o, documents=documents))
    assert ours[0][1].dtype == jnp.float64
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-9),
        ours,
        reference,
    )


def test_large_steps_and_rates_are_finite():
    (x, _, a, b, c), documents = draw(16, documents=4)
    dt = jnp.full((ROWS, 16, HEADS), 1e4)

    @jax.jit
    @jax.value_and_grad
    def total(dt):
        return jnp.sum(ssd(x, dt, a, b, c, documents=documents, chunk=8))

    value, gradient = total(dt)
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()


def test_bfloat16_operands_are_summed_in_float32():
    operands, documents = draw(64, documents=3)
    x, dt, a, b, c = operands
    low = lambda v: v.astype(jnp.bfloat16)
    single = (low(x), dt.astype(jnp.float32), a.astype(jnp.float32), low(b), low(c))
    scan = jax.jit(lambda *operands: ssd(*operands, documents=documents, chunk=16))
    y, exact = scan(*single), scan(*(v.astype(jnp.float64) for v in single))
    assert y.dtype == jnp.float32
    # Weights and states are rounded to bfloat16, and their errors are not of one sign.
    error = np.linalg.norm(y - exact) / np.linalg.norm(exact)
    assert 1e-4 < error < 2**-8
