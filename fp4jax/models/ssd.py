"""The state-space recurrence of Mamba-2, by chunks of tokens.

    h_t = exp(dt_t a) h_{t-1} + dt_t B_t x_t^T        y_t = C_t^T h_t

for each head, with h [n, p]. Within a chunk this is attention with decaying weights and
no softmax, all tokens at once; from one chunk to the next a state is handed on.

References: Dao & Gu, Transformers are SSMs, 2024, section 6.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from fp4jax.kernels.sums import float32_on_cpu


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
    chunks = _chunks(x, dt, a, b, c, documents=documents, size=min(chunk, x.shape[1]))
    y = _of_own_chunk(chunks) + _of_chunks_before(chunks)  # [b, m, t, g, r, p]
    rows, length, *shape = x.shape
    return y.reshape(rows, -1, *shape)[:, :length]


class _Chunks(NamedTuple):
    """The operands by m chunks of t tokens; heads are groups [g] times [r].

    exp(decay_i - decay_j) is what is left at i of what was written at j.
    """

    x: jax.Array  # [b, m, t, g, r, p]
    dt: jax.Array  # [b, m, g, r, t]
    decay: jax.Array  # [b, m, g, r, t], the sum of dt a up to a token
    b: jax.Array  # [b, m, t, g, n]
    c: jax.Array  # [b, m, t, g, n]
    documents: jax.Array  # [b, m, 1, 1, t]


def _chunks(x, dt, a, b, c, *, documents, size: int) -> _Chunks:
    """Returns the operands of `ssd` by chunks; padding neither writes nor decays."""
    rows, length, heads, channels = x.shape
    groups, numbers = b.shape[2:]

    def split(values: jax.Array, *shape: int, mode: str = "constant") -> jax.Array:
        widths = [(0, 0), (0, -length % size), *[(0, 0)] * (values.ndim - 2)]
        return jnp.pad(values, widths, mode=mode).reshape(rows, -1, size, *shape)

    by_group = (groups, heads // groups)
    dt = jnp.moveaxis(split(dt, *by_group), 2, -1)
    return _Chunks(
        x=split(x, *by_group, channels),
        dt=dt,
        decay=jnp.cumsum(dt * a.reshape(1, 1, *by_group, 1), axis=-1),
        b=split(b, groups, numbers),
        c=split(c, groups, numbers),
        documents=split(documents, mode="edge")[:, :, None, None],
    )


def _of_own_chunk(chunks: _Chunks) -> jax.Array:
    """Returns what every token reads of the tokens up to it in its chunk."""
    x, dt, decay, b, c, documents = chunks
    seen = documents[..., None] == documents[..., None, :]  # [b, m, 1, 1, t, t]
    seen &= jnp.tri(x.shape[2], dtype=bool)[(None,) * 4]
    left = _exp(decay[..., None] - decay[..., None, :], where=seen)
    scores = _product("bmign,bmjgn->bmgij", c, b, dt.dtype)
    weights = scores[:, :, :, None] * left * dt[..., None, :]  # [b, m, g, r, t, t]
    return _product("bmgrij,bmjgrp->bmigrp", weights.astype(x.dtype), x, dt.dtype)


def _of_chunks_before(chunks: _Chunks) -> jax.Array:
    """Returns what every token reads of the state that its chunk begins with."""
    x, dt, decay, b, c, documents = chunks
    ends = documents[..., -1:]
    before = jnp.pad(ends[:, :-1], [(0, 0), (1, 0), *[(0, 0)] * 3])
    tokens_first = lambda v: jnp.moveaxis(v, -1, 2)[..., None]  # [b, m, t, g, r, 1]

    written = dt * _exp(decay[..., -1:] - decay, where=documents == ends)
    x = (x * tokens_first(written)).astype(x.dtype)
    added = _product("bmjgn,bmjgrp->bmgrnp", b, x, dt.dtype)
    kept = _exp(decay[..., -1:], where=ends == before)[..., None]
    states = _handed_on(added, kept).astype(x.dtype)
    read = _product("bmign,bmgrnp->bmigrp", c, states, dt.dtype)
    return read * tokens_first(_exp(decay, where=documents == before))


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
    product = functools.partial(
        jnp.einsum,
        labels,
        precision=lax.Precision.HIGHEST,
        preferred_element_type=dtype,
    )
    return float32_on_cpu(product, x, y)


def _product_fwd(labels: str, x: jax.Array, y: jax.Array, dtype: Any):
    return _product(labels, x, y, dtype), (x, y)


def _product_bwd(labels: str, dtype: Any, operands: tuple[jax.Array, ...], g):
    product = functools.partial(jnp.einsum, labels, precision=lax.Precision.HIGHEST)
    return jax.vjp(product, *operands)[1](g.astype(operands[0].dtype))


_product.defvjp(_product_fwd, _product_bwd)
