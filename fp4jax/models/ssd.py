"""The state-space recurrence of Mamba-2, by chunks of tokens.

    h_t = exp(dt_t a) h_{t-1} + dt_t B_t x_t^T        y_t = C_t^T h_t

for each head, with h [n, p]. Within a chunk this is attention with decaying weights and
no softmax, all tokens at once; from one chunk to the next a state is handed on.

References: Dao & Gu, Transformers are SSMs, 2024, section 6.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def ssd(
    x: jax.Array,
    dt: jax.Array,
    a: jax.Array,
    b: jax.Array,
    c: jax.Array,
    *,
    documents: jax.Array,
    chunk: int,
) -> jax.Array:
    """Returns y of the recurrence, whose state is zero where a document begins.

    Products have operands of x's dtype and sums of that of `dt`, as have decays and
    states.

    Args:
      x: [b, t, h, p] inputs of each head.
      dt: [b, t, h] step sizes, not negative, float32 or float64.
      a: [h] rates, not positive, of the dtype of `dt`.
      b: [b, t, g, n] what the heads of a group write with, of the dtype of x.
      c: [b, t, g, n] what they read with, of the dtype of x.
      documents: [b, t] int32, of each token the number of its document, which never
        falls along a row.
      chunk: tokens of a chunk, whatever t is.

    Returns:
      [b, t, h, p], of the dtype of `dt`.
    """
    rows, length, heads, channels = x.shape
    groups, size = b.shape[2], min(chunk, length)

    def chunks(values: jax.Array, *shape: int, mode: str = "constant") -> jax.Array:
        widths = [(0, 0), (0, -length % size), *[(0, 0)] * (values.ndim - 2)]
        return jnp.pad(values, widths, mode=mode).reshape(rows, -1, size, *shape)

    # Of m chunks; heads are [g, r]. Padding neither writes nor decays.
    by_group = (groups, heads // groups)
    x = chunks(x, *by_group, channels)  # [b, m, t, g, r, p]
    b, c = (chunks(each, groups, each.shape[3]) for each in (b, c))  # [b, m, t, g, n]
    dt = jnp.moveaxis(chunks(dt, *by_group), 2, -1)  # [b, m, g, r, t]
    documents = chunks(documents, mode="edge")[:, :, None, None]  # [b, m, 1, 1, t]
    ends = documents[..., -1:]
    before = jnp.pad(
        ends[:, :-1], [(0, 0), (1, 0), *[(0, 0)] * 3]
    )  # the first has none
    # exp(decay_i - decay_j) is what is left at i of what was written at j.
    decay = jnp.cumsum(dt * a.reshape(1, 1, *by_group, 1), axis=-1)

    # What the tokens of a chunk read of those before them in it.
    same = documents[..., None] == documents[..., None, :]
    seen = same & jnp.tri(size, dtype=bool)[(None,) * 4]
    left = _exp(
        decay[..., None] - decay[..., None, :], where=seen
    )  # [b, m, g, r, t, t]
    scores = _product("bmign,bmjgn->bmgij", c, b, dt.dtype)
    weights = (scores[:, :, :, None] * left * dt[..., None, :]).astype(x.dtype)
    y = _product("bmgrij,bmjgrp->bmigrp", weights, x, dt.dtype)

    # What they read of the state before the chunk.
    left = _exp(decay[..., -1:] - decay, where=documents == ends) * dt
    scaled = (x * jnp.moveaxis(left, -1, 2)[..., None]).astype(x.dtype)
    added = _product("bmjgn,bmjgrp->bmgrnp", b, scaled, dt.dtype)
    kept = _exp(decay[..., -1:], where=ends == before)[..., None]
    states = _handed_on(added, kept)  # [b, m, g, r, n, p]
    read = _product("bmign,bmgrnp->bmigrp", c, states.astype(x.dtype), dt.dtype)
    left = _exp(decay, where=documents == before)
    y += read * jnp.moveaxis(left, -1, 2)[..., None]
    return y.reshape(rows, -1, heads, channels)[:, :length]


def _handed_on(added: jax.Array, kept: jax.Array) -> jax.Array:
    """Returns the state before each chunk: state_{m+1} = kept_m state_m + added_m."""

    def step(state, chunk):
        added, kept = chunk
        return kept * state + added, state

    by_chunk = (jnp.moveaxis(added, 1, 0), jnp.moveaxis(kept, 1, 0))
    _, states = lax.scan(step, jnp.zeros_like(added[:, 0]), by_chunk)
    return jnp.moveaxis(states, 0, 1)


def _exp(exponent: jax.Array, *, where: jax.Array) -> jax.Array:
    """Returns exp, and 0 elsewhere, however large the exponent there is."""
    return jnp.exp(jnp.where(where, exponent, -jnp.inf))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 3))
def _product(labels: str, x: jax.Array, y: jax.Array, dtype: Any) -> jax.Array:
    """Returns an einsum with sums in `dtype`; its gradients have operands of x's."""
    return jnp.einsum(
        labels, x, y, precision=lax.Precision.HIGHEST, preferred_element_type=dtype
    )


def _product_fwd(labels: str, x: jax.Array, y: jax.Array, dtype: Any):
    return _product(labels, x, y, dtype), (x, y)


def _product_bwd(labels: str, dtype: Any, operands: tuple[jax.Array, ...], g):
    product = functools.partial(jnp.einsum, labels, precision=lax.Precision.HIGHEST)
    return jax.vjp(product, *operands)[1](g.astype(operands[0].dtype))


_product.defvjp(_product_fwd, _product_bwd)
