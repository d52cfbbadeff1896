"""Products of tiles of tokens, each by the matrix of its group, with float32 sums."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

_dot = functools.partial(lax.dot_general, preferred_element_type=jnp.float32)


def rows(x: jax.Array, w: jax.Array, of: jax.Array, *, precision: Any) -> jax.Array:
    """Returns y_t = x_t w_{of t}, float32 [t, a, n].

    Args:
      x: [t, a, k] tiles.
      w: [e, k, n] of the dtype of x.
      of: int32 [t], the group of each tile; zeros where it is e.
      precision: as of `lax.dot_general`.
    """

    def scan(x: jax.Array, w: jax.Array, of: jax.Array) -> jax.Array:
        def multiply(x: jax.Array, i: jax.Array) -> jax.Array:
            w_i = lax.dynamic_index_in_dim(w, i, keepdims=False)
            return _dot(x, w_i, (((1,), (0,)), ((), ())), precision)

        def tile(_, tile):
            x, i = tile
            zeros = lambda x, i: jnp.zeros((x.shape[0], w.shape[2]), jnp.float32)
            return None, lax.cond(i < w.shape[0], multiply, zeros, x, i)

        return lax.scan(tile, None, (x, of))[1]

    return _float32_on_cpu(scan, x, w, of)


def weights(
    x: jax.Array, dy: jax.Array, of: jax.Array, count: int, *, precision: Any
) -> jax.Array:
    """Returns dw_i = sum_{t: of t = i} x_t^T dy_t, float32 [count, k, n].

    Args:
      x: [t, a, k] tiles.
      dy: [t, a, n] of the dtype of x.
      of: int32 [t], the group of each tile; `count` of one that takes no part.
      count: number of groups; one without tiles gets exact zeros.
      precision: as of `lax.dot_general`.
    """

    def scan(x: jax.Array, dy: jax.Array, of: jax.Array) -> jax.Array:
        def add(dw: jax.Array, x: jax.Array, dy: jax.Array, i: jax.Array) -> jax.Array:
            return dw.at[i].add(_dot(x, dy, (((0,), (0,)), ((), ())), precision))

        def tile(dw, tile):
            keep = lambda dw, *_: dw
            return lax.cond(tile[2] < count, add, keep, dw, *tile), None

        dw = jnp.zeros((count, x.shape[2], dy.shape[2]), jnp.float32)
        return lax.scan(tile, dw, (x, dy, of))[0]

    return _float32_on_cpu(scan, x, dy, of)


def _float32_on_cpu(product: Any, a: jax.Array, b: jax.Array, of: jax.Array):
    """Calls a product; on a CPU of float32 operands, exact likewise, and faster."""
    if a.dtype == jnp.float32:
        return product(a, b, of)
    return lax.platform_dependent(
        a,
        b,
        of,
        cpu=lambda a, b, of: product(a.astype(jnp.float32), b.astype(jnp.float32), of),
        default=product,
    )
