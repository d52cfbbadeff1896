"""Grouped products by the kernels for Hopper GPUs that come with JAX.

Their float32 sums are rounded to bfloat16, before tensor scales multiply them. They are
not chosen by themselves: `with KERNELS(Kernels(products=HOPPER)): ...`, around what is
traced.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp

from fp4jax.kernels.choice import Products
from fp4jax.numerics.groups import Groups
from fp4jax.ops.grouped_matmul import has_group, in_order

_BLOCKS = {"block_m": 128, "block_n": 128, "block_k": 64}
_SCHEDULE = {"max_concurrent_steps": 4, "grid_block_n": 8}
_MULTIPLE = 128  # whole blocks of either kernel, on either side of a product


def _supports(sizes: tuple[int, int], dtype: Any, precision: Any) -> bool:
    whole = all(size % _MULTIPLE == 0 for size in sizes)
    return dtype == jnp.bfloat16 and precision is None and whole


def _rows(x: jax.Array, w: jax.Array, groups: Groups, *, axis: int) -> jax.Array:
    from jax.experimental.pallas.ops.gpu.ragged_dot_mgpu import ragged_dot

    order, sizes = _in_order(groups, x.shape[1])
    y = ragged_dot(
        _rows_of(x, order),
        w,
        group_sizes=sizes,
        transpose_rhs=axis == 2,
        **_BLOCKS,
        **_SCHEDULE,
    )
    y = y.reshape(-1, x.shape[1], y.shape[1])
    y = jnp.zeros((len(x), *y.shape[1:]), y.dtype).at[order].set(y, mode="drop")
    # No kernel writes the rows of tiles without a group.
    return jnp.where(has_group(groups), y.astype(jnp.float32), 0)


def _weights(x: jax.Array, dy: jax.Array, groups: Groups) -> jax.Array:
    from jax.experimental.pallas.ops.gpu.transposed_ragged_dot_mgpu import (
        transposed_ragged_dot,
    )

    order, sizes = _in_order(groups, x.shape[1])
    dw = transposed_ragged_dot(
        _rows_of(x, order),
        _rows_of(dy, order),
        group_sizes=sizes,
        **_BLOCKS,
        **_SCHEDULE,
    )
    return dw.astype(jnp.float32)


def _in_order(groups: Groups, rows: int) -> tuple[jax.Array, jax.Array]:
    """Returns `in_order`, with as many tiles that are none as make whole blocks."""
    order, sizes = in_order(groups, rows)
    more = -len(order) % (math.lcm(rows, _MULTIPLE) // rows)
    return jnp.pad(order, (0, more), constant_values=len(order)), sizes


def _rows_of(x: jax.Array, order: jax.Array) -> jax.Array:
    """Returns the rows of tiles, zeros of those that are none."""
    return x.at[order].get(mode="fill", fill_value=0).reshape(-1, x.shape[2])


HOPPER = Products(_supports, _rows, _weights)
