"""`lax.ragged_dot` whose three training GEMMs are quantized as a recipe says."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fp4jax.ops.arguments import check_integer, check_none, check_recipe
from fp4jax.ops.grouped_dot import grouped_dot
from fp4jax.ops.tiles import Tiles, tile_rows
from fp4jax.recipes import Recipe


def ragged_dot(
    x: jax.Array,
    w: jax.Array,
    group_sizes: jax.Array,
    *,
    recipe: Recipe | None = None,
    key: jax.Array | None = None,
    held: jax.Array | None = None,
    step: jax.Array | int | None = None,
    microbatch: jax.Array | int | None = None,
    positions: jax.Array | None = None,
    precision: Any = None,
    preferred_element_type: Any = None,
) -> jax.Array:
    """Multiplies groups of rows by a matrix each, with all three GEMMs quantized.

    y_g = Q(x_g) Q(w_g),  dx_g = Q(dy_g) Q(w_g)^T,  dw_g = Q(x_g)^T Q(dy_g)

    Every group is a `fp4jax.dot_general` of its own: no block, rotation, tensor scale
    or held amax is of two groups, whatever their sizes; an empty one has a dw of exact
    zeros. Inside, rows are laid out so that each group begins with a block.

    Works under jit, vmap, scan, remat and reverse-mode differentiation of first order.
    Under `jax.vmap` an unbatched key gives every lane the same noise.

    Args:
      x: [m, k] float32, bfloat16 or float16, sorted by group.
      w: [e, k, n] likewise; may differ from `x` in dtype.
      group_sizes: int32 [e], not negative, of a sum of at most m. Rows beyond it give
        zeros.
      recipe: what to quantize; None is `lax.ragged_dot` itself, which takes no `held`,
        `step`, `microbatch` or `positions`.
      key: as for `fp4jax.dot_general`.
      held: float32 [e, 3], the held amaxes of each group, as for `fp4jax.dot_general`.
      step: as for `fp4jax.dot_general`.
      microbatch: integer scalar i: adds i m to the positions of rows.
      positions: uint32 [m], below 2^31: where each row would stand in a batch that is
        not sorted, whose random bits it gets. None: the number of the row.
      precision: as for `lax.dot_general`, of all three GEMMs.
      preferred_element_type: the dtype of the result.

    Returns:
      [m, n].

    Raises:
      ValueError: sizes that are no vector of e integers; a recipe that draws, without
        a key; several keys; `held`, `step`, `microbatch` or `positions` that do not
        fit; rows that are spread over explicit axes of a mesh.
      TypeError: operands that are not float, or whose dimensions do not match; a key
        that is none, or of another implementation than Threefry.
      NotImplementedError: a second derivative; `compute` of "fp8" or "native"; `held`
        under vmap.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from fp4jax import recipes
      >>> x, w = jnp.ones((32, 64), jnp.bfloat16), jnp.ones((4, 64, 8))
      >>> sizes = jnp.array([3, 0, 17, 12])
      >>> y = ragged_dot(x, w, sizes, recipe=recipes.ufp4(), key=jax.random.key(0))
      >>> y.shape, y.dtype
      ((32, 8), dtype('float32'))
    """
    x, w, group_sizes = jnp.asarray(x), jnp.asarray(w), jnp.asarray(group_sizes)
    _check_shapes(x, w, group_sizes)
    if recipe is None:
        check_none(
            "ragged_dot",
            held=held,
            step=step,
            microbatch=microbatch,
            positions=positions,
        )
        return lax.ragged_dot(
            x,
            w,
            group_sizes,
            precision=precision,
            preferred_element_type=preferred_element_type,
        )
    check_recipe(recipe, "ragged_dot")
    m = x.shape[0]
    positions, first = _positions(positions, microbatch, m)
    _check_spread(x=x, group_sizes=group_sizes, positions=positions)
    tiles = Tiles.of_sizes(group_sizes.astype(jnp.int32), m, rows=tile_rows(recipe))
    y = grouped_dot(
        tiles.lay_out(x),
        w,
        tiles.groups,
        recipe=recipe,
        key=key,
        positions=tiles.positions(positions),
        first_position=first,
        held=held,
        step=step,
        precision=precision,
        preferred_element_type=preferred_element_type,
    )
    return tiles.rows_of(y)


def _check_shapes(x: jax.Array, w: jax.Array, sizes: jax.Array) -> None:
    if (x.ndim, w.ndim) != (2, 3) or x.shape[1] != w.shape[1]:
        raise TypeError(
            "ragged_dot: x and w must be [m, k] and [e, k, n], got shapes "
            f"{x.shape} and {w.shape}."
        )
    if 0 in w.shape:
        raise ValueError(
            "ragged_dot: w must have a matrix of at least one row and column, got "
            f"shape={w.shape}."
        )
    integers = jnp.issubdtype(sizes.dtype, jnp.integer)
    if sizes.shape != w.shape[:1] or not integers:
        raise ValueError(
            f"ragged_dot: group_sizes must be {w.shape[0]} integers, one for each "
            f"matrix of w, got shape={sizes.shape}, dtype={sizes.dtype}."
        )


def _check_spread(**arrays: jax.Array) -> None:
    for name, array in arrays.items():
        sharding = jax.typeof(array).sharding
        if sharding.spec[0] is not None:
            raise ValueError(
                f"ragged_dot: {name} must not be spread along its first axis, since "
                "rows move to where their groups are, got "
                f"spec={sharding.spec} of {dict(sharding.mesh.shape)}. Bring it "
                f"together, jax.sharding.reshard({name}, jax.P()), or call ragged_dot "
                "inside of jax.shard_map, on the rows of each device."
            )


def _positions(positions: Any, microbatch: Any, m: int) -> tuple[jax.Array, Any]:
    """Returns uint32 [m] and what is added to them."""
    if positions is None:
        positions = jnp.arange(m, dtype=jnp.uint32)
    if jnp.shape(positions) != (m,) or jnp.result_type(positions) != jnp.uint32:
        raise ValueError(
            f"ragged_dot: positions must be uint32[{m}], one for each row of x, got "
            f"shape={jnp.shape(positions)}, dtype={jnp.result_type(positions)}."
        )
    if microbatch is None:
        return positions, None
    check_integer(microbatch, "ragged_dot", name="microbatch")
    return positions, jnp.asarray(microbatch).astype(jnp.uint32) * jnp.uint32(m)
