"""Products of tiles of tokens, each by the matrix of its group, with float32 sums."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fp4jax.kernels import devices, grouped_matmul
from fp4jax.kernels.choice import Products, chosen
from fp4jax.kernels.log import once
from fp4jax.kernels.sums import float32_on_cpu, in_turn
from fp4jax.numerics.groups import Groups
from fp4jax.numerics.manual import varying_as

_say = once(__name__, "grouped products run as a scan in XLA: %s.")
_dot = functools.partial(lax.dot_general, preferred_element_type=jnp.float32)


def rows(
    x: jax.Array,
    w: jax.Array,
    groups: Groups,
    *,
    axis: int,
    precision: Any,
    factors: Sequence[jax.Array] = (),
    dtype: Any = jnp.float32,
) -> jax.Array:
    """Returns y_t = x_t w_{of t} factors_{of t}, or x_t w_{of t}^T, [t, a, n].

    Args:
      x: [t, a, k] tiles.
      w: [e, k, n] of the dtype of x, or [e, n, k].
      groups: of the tiles; one without a group gives zeros.
      axis: of w that is contracted: 1, or 2.
      precision: as of `lax.dot_general`.
      factors: float32 [e], which multiply the float32 sums, one after the other.
      dtype: of the result, to which those are rounded.
    """
    if (kernels := _kernels(x, w.shape[3 - axis], precision)) is not None:
        return kernels.rows(x, w, groups, axis=axis, factors=factors, dtype=dtype)
    scan = functools.partial(scan_rows, groups=groups, axis=axis, precision=precision)
    return _times(float32_on_cpu(scan, x, w), factors, groups).astype(dtype)


def weights(
    x: jax.Array,
    dy: jax.Array,
    groups: Groups,
    *,
    precision: Any,
    factors: Sequence[jax.Array] = (),
    dtype: Any = jnp.float32,
) -> jax.Array:
    """Returns dw_i = sum_{t: of t = i} x_t^T dy_t factors_i, [e, k, n].

    Args:
      x: [t, a, k] tiles.
      dy: [t, a, n] of the dtype of x.
      groups: of the tiles; one without tiles gets exact zeros.
      precision: as of `lax.dot_general`.
      factors: float32 [e], which multiply the float32 sums, one after the other.
      dtype: of the result, to which those are rounded.
    """
    if (kernels := _kernels(x, dy.shape[2], precision)) is not None:
        return kernels.weights(x, dy, groups, factors=factors, dtype=dtype)
    scan = functools.partial(scan_weights, groups=groups, precision=precision)
    each = Groups(None, groups.count)
    return _times(float32_on_cpu(scan, x, dy), factors, each).astype(dtype)


def scan_rows(
    x: jax.Array, w: jax.Array, groups: Groups, *, axis: int, precision: Any
) -> jax.Array:
    """Computes `rows` tile by tile."""
    shape = x.shape[1], w.shape[3 - axis]
    zeros = varying_as(jnp.zeros(shape, jnp.float32), x, w, groups.of)

    def multiply(x: jax.Array, i: jax.Array) -> jax.Array:
        w_i = lax.dynamic_index_in_dim(w, i, keepdims=False)
        return _dot(x, w_i, (((1,), (axis - 1,)), ((), ())), precision)

    def tile(_, tile):
        x, i = tile
        return None, lax.cond(i < groups.count, multiply, lambda *_: zeros, x, i)

    return lax.scan(tile, None, (x, groups.of))[1]


def scan_weights(
    x: jax.Array, dy: jax.Array, groups: Groups, *, precision: Any
) -> jax.Array:
    """Computes `weights` tile by tile."""

    def add(dw: jax.Array, x: jax.Array, dy: jax.Array, i: jax.Array) -> jax.Array:
        return dw.at[i].add(_dot(x, dy, (((0,), (0,)), ((), ())), precision))

    def tile(dw, tile):
        keep = lambda dw, *_: dw
        return lax.cond(tile[2] < groups.count, add, keep, dw, *tile), None

    zeros = jnp.zeros((groups.count, x.shape[2], dy.shape[2]), jnp.float32)
    zeros = varying_as(zeros, x, dy, groups.of)
    return lax.scan(tile, zeros, (x, dy, groups.of))[0]


def ragged_rows(
    x: jax.Array,
    w: jax.Array,
    groups: Groups,
    *,
    axis: int,
    factors: Sequence[jax.Array] = (),
    dtype: Any,
) -> jax.Array:
    """Computes `rows` by `lax.ragged_dot_general`."""
    assert groups.of is not None
    order, sizes = in_order(groups, x.shape[1])
    y = _ragged_dot(x[order], w, sizes, contracting=(1, axis), of_rhs=[0])
    ordered = Groups(groups.of[order], groups.count)
    y = _times(y.reshape(*x.shape[:2], -1), factors, ordered).astype(dtype)
    y = jnp.zeros_like(y).at[order].set(y, unique_indices=True)
    return jnp.where(has_group(groups), y, 0)


def ragged_weights(
    x: jax.Array,
    dy: jax.Array,
    groups: Groups,
    *,
    factors: Sequence[jax.Array] = (),
    dtype: Any,
) -> jax.Array:
    """Computes `weights` by `lax.ragged_dot_general`."""
    order, sizes = in_order(groups, x.shape[1])
    dy = dy[order].reshape(-1, dy.shape[2])
    dw = _ragged_dot(x[order], dy, sizes, contracting=(0, 0), of_rhs=[])
    return _times(dw, factors, Groups(None, groups.count)).astype(dtype)


def in_order(groups: Groups, rows: int) -> tuple[jax.Array, jax.Array]:
    """Returns the tiles in the order of their groups, and the rows of each group."""
    assert groups.of is not None
    tiles = jnp.zeros(groups.count, jnp.int32).at[groups.of].add(1, mode="drop")
    return jnp.argsort(groups.of, stable=True).astype(jnp.int32), tiles * rows


def has_group(groups: Groups) -> jax.Array:
    """Returns bool [t, 1, 1]: whether a tile is of any group."""
    assert groups.of is not None
    return (groups.of < groups.count)[:, None, None]


def _times(y: jax.Array, factors: Sequence[jax.Array], groups: Groups) -> jax.Array:
    """Returns sums, whose first axis is of groups, times the factors [e] of each."""
    if groups.of is not None:  # zeros without a group stay so, whatever factors are
        place = [factor.at[groups.of] for factor in factors]
        factors = [at.get(mode="fill", fill_value=0) for at in place]
    inner = range(1, y.ndim)
    return in_turn(y, [lax.expand_dims(factor, inner) for factor in factors])


def _ragged_dot(
    x: jax.Array,
    rhs: jax.Array,
    sizes: jax.Array,
    *,
    contracting: tuple[int, int],
    of_rhs: list[int],
) -> jax.Array:
    lhs, rhs_axis = contracting
    dimensions = lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((lhs,), (rhs_axis,)), ((), ())),
        lhs_ragged_dimensions=[0],
        rhs_group_dimensions=of_rhs,
    )
    return lax.ragged_dot_general(
        x.reshape(-1, x.shape[2]),
        rhs,
        sizes,
        dimensions,
        preferred_element_type=jnp.float32,
    )


def _kernels(x: jax.Array, n: int, precision: Any) -> Products | None:
    """Returns those of the context if they take products of tiles x and n features."""
    kernels = chosen().products or grouped_matmul.of_device()
    if kernels is None:
        _say(str(devices.without_wgmma()))
        return None
    if (why := kernels.why_not(x, (x.shape[2], n), precision)) is None:
        return kernels
    _say(why)
    return None


# The scan over tiles on every device, Hopper GPUs too.
SCAN = Products(lambda *_: "the scan is chosen", scan_rows, scan_weights)
# By `lax.ragged_dot_general`, which does not know every `jax.vmap`.
RAGGED = Products(
    lambda x, sizes, precision: (
        None if precision is None else f"precision must be None, got {precision}"
    ),
    ragged_rows,
    ragged_weights,
)
