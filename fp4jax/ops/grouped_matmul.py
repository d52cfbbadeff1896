"""Products of tiles of tokens, each by the matrix of its group, with float32 sums."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fp4jax.numerics.groups import Groups

_dot = functools.partial(lax.dot_general, preferred_element_type=jnp.float32)


@dataclasses.dataclass(frozen=True)
class Kernels:
    """What multiplies in place of the scan over tiles, where it can.

    Attributes:
      supports: whether the others take features k and n, a dtype and a precision.
      rows: as `rows`, without precision.
      weights: as `weights`, without precision.
    """

    supports: Callable[[tuple[int, int], Any, Any], bool]
    rows: Callable[..., jax.Array]
    weights: Callable[..., jax.Array]


# None, or the `Kernels` of the products that are traced in its context. Part of the key
# of every jit cache.
KERNELS: Any = jax.make_user_context()


def rows(
    x: jax.Array, w: jax.Array, groups: Groups, *, axis: int, precision: Any
) -> jax.Array:
    """Returns y_t = x_t w_{of t}, or x_t w_{of t}^T, float32 [t, a, n].

    Args:
      x: [t, a, k] tiles.
      w: [e, k, n] of the dtype of x, or [e, n, k].
      groups: of the tiles; one without a group gives zeros.
      axis: of w that is contracted: 1, or 2.
      precision: as of `lax.dot_general`.
    """
    n = w.shape[3 - axis]
    if (kernels := _kernels(x, n, precision)) is not None:
        return kernels.rows(x, w, groups, axis=axis)

    def scan(x: jax.Array, w: jax.Array, of: jax.Array) -> jax.Array:
        def multiply(x: jax.Array, i: jax.Array) -> jax.Array:
            w_i = lax.dynamic_index_in_dim(w, i, keepdims=False)
            return _dot(x, w_i, (((1,), (axis - 1,)), ((), ())), precision)

        def tile(_, tile):
            x, i = tile
            zeros = lambda x, i: jnp.zeros((x.shape[0], n), jnp.float32)
            return None, lax.cond(i < groups.count, multiply, zeros, x, i)

        return lax.scan(tile, None, (x, of))[1]

    return _float32_on_cpu(scan, x, w, groups.of)


def weights(
    x: jax.Array, dy: jax.Array, groups: Groups, *, precision: Any
) -> jax.Array:
    """Returns dw_i = sum_{t: of t = i} x_t^T dy_t, float32 [e, k, n].

    Args:
      x: [t, a, k] tiles.
      dy: [t, a, n] of the dtype of x.
      groups: of the tiles; one without tiles gets exact zeros.
      precision: as of `lax.dot_general`.
    """
    if (kernels := _kernels(x, dy.shape[2], precision)) is not None:
        return kernels.weights(x, dy, groups)
    shape = (groups.count, x.shape[2], dy.shape[2])

    def scan(x: jax.Array, dy: jax.Array, of: jax.Array) -> jax.Array:
        def add(dw: jax.Array, x: jax.Array, dy: jax.Array, i: jax.Array) -> jax.Array:
            return dw.at[i].add(_dot(x, dy, (((0,), (0,)), ((), ())), precision))

        def tile(dw, tile):
            keep = lambda dw, *_: dw
            return lax.cond(tile[2] < groups.count, add, keep, dw, *tile), None

        return lax.scan(tile, jnp.zeros(shape, jnp.float32), (x, dy, of))[0]

    return _float32_on_cpu(scan, x, dy, groups.of)


def _kernels(x: jax.Array, n: int, precision: Any) -> Kernels | None:
    """Returns those of the context if they take products of tiles x and n features."""
    kernels: Kernels | None = KERNELS.value
    if kernels is None or not kernels.supports((x.shape[2], n), x.dtype, precision):
        return None
    return kernels


def _float32_on_cpu(product: Any, a: jax.Array, b: jax.Array, of: Any) -> jax.Array:
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
