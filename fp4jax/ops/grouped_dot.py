"""The product of tiles of tokens, each by the weight of its group, quantized."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fp4jax.numerics import Site
from fp4jax.numerics.groups import Groups
from fp4jax.numerics.manual import varying_as
from fp4jax.ops.arguments import (
    check_drawn,
    check_operands,
    check_recipe,
    checked_step,
)
from fp4jax.ops.gather import Gather
from fp4jax.ops.gemms import COMPUTE, NO_AMAXES
from fp4jax.ops.grouped_gemms import GroupedGemms
from fp4jax.ops.noise import Noise
from fp4jax.ops.observer import observed
from fp4jax.ops.residuals import PackedOperand, PackedWeight
from fp4jax.ops.tiles import filled
from fp4jax.ops.vjp import fp4_dot, pack_weight
from fp4jax.recipes import Recipe


def grouped_dot(
    x: jax.Array,
    w: jax.Array,
    groups: Groups,
    *,
    recipe: Recipe,
    key: jax.Array | None = None,
    positions: jax.Array | None = None,
    first_position: jax.Array | int | None = None,
    held: jax.Array | None = None,
    step: jax.Array | int | None = None,
    precision: Any = None,
    preferred_element_type: Any = None,
    packed: PackedOperand | None = None,
    packed_w: PackedWeight | None = None,
) -> jax.Array:
    """Computes `fp4jax.ragged_dot` of rows that are laid out in tiles already.

    y_t = Q(x_t) Q(w_{of t})

    A tile is whole blocks of rows, `tile_rows` of them or a multiple, with zeros where
    it has fewer.

    Args:
      x: [t, a, k].
      w: [e, k, n].
      groups: of the tiles, with the mesh axes over which they are spread.
      recipe: as for `fp4jax.ragged_dot`.
      key: likewise.
      positions: uint32 [t, a] of `Tiles.positions`, whose random bits each row gets;
        needed by recipes that draw.
      first_position: integer scalar, added to the positions.
      held: as for `fp4jax.ragged_dot`.
      step: likewise.
      precision: likewise.
      preferred_element_type: likewise.
      packed: from `pack_tokens`: what the backward pass needs of x.
      packed_w: from `pack_experts` or `gather_experts`.

    Returns:
      [t, a, n].
    """
    caller = "ragged_dot"
    check_recipe(recipe, caller)
    product = lambda x, w: lax.dot(
        x[0], w[0], preferred_element_type=preferred_element_type
    )
    out = jax.eval_shape(product, x, w)  # checks the dimensions as lax does
    check_operands(recipe, key, caller, x=x, w=w, result=out)
    if recipe.compute not in ("bf16", "f32"):
        raise NotImplementedError(
            "ragged_dot: recipe.compute must be 'bf16' or 'f32', got "
            f"{recipe.compute!r}, for which there is no grouped GEMM. Replace it for "
            "layers of groups: dataclasses.replace(recipe, compute='bf16')."
        )
    fprop = Site.FPROP_X, Site.FPROP_W
    check_drawn(recipe, key, caller, *fprop, why="for the forward pass of")
    step = checked_step(recipe, held, step, caller=caller, groups=groups.count)
    _check_packed(packed, recipe)
    _check_packed_w(packed_w, recipe)
    others = groups, key, positions, first_position, held, packed, packed_w
    x, w = varying_as((x, w), *others)
    gemms = GroupedGemms(
        recipe, 1, "rhs", precision, out.dtype, None, jax.typeof(x), jax.typeof(w)
    )
    if positions is None and key is not None and recipe.draws():
        raise ValueError(
            "ragged_dot: positions must be given for a recipe that draws, or its noise "
            "would depend on how tiles are laid out, got positions=None. Pass those of "
            "Tiles.positions."
        )
    if first_position is not None:
        first_position = jnp.asarray(first_position).astype(jnp.uint32)
    if positions is not None:
        positions = filled(positions, first_position)
    noise = Noise(key, positions=positions)
    with observed(gemms):
        return fp4_dot(gemms, x, w, noise, held, step, packed, packed_w, groups)


def pack_tokens(x: jax.Array, groups: Groups, *, recipe: Recipe) -> PackedOperand:
    """Packs what the backward pass needs of tiles, once for all products of them.

    Args:
      x: [t, a, k], of `grouped_dot`.
      groups: likewise.
      recipe: of the calls; one of packed residuals that neither draws for x in them nor
        holds its amax.
    """
    gemms = dataclasses.replace(GroupedGemms.of_one(x, recipe), groups=groups)
    return gemms.pack(x, Noise(), NO_AMAXES)


def pack_experts(
    w: jax.Array,
    *,
    recipe: Recipe,
    key: jax.Array | None = None,
    held: jax.Array | None = None,
    step: jax.Array | int | None = None,
) -> PackedWeight:
    """Quantizes the weights of all groups once, for `packed_w` of `grouped_dot`.

    Args:
      w: [e, k, n].
      recipe: of the calls.
      key: of the calls; needed where a site of w draws.
      held: of the calls.
      step: of the calls.
    """
    caller = "pack_experts"
    check_recipe(recipe, caller)
    check_operands(recipe, key, caller, w=w)
    step = checked_step(recipe, held, step, caller=caller, groups=w.shape[0])
    of_w = Site.FPROP_W, Site.DGRAD_W
    check_drawn(recipe, key, caller, *of_w, why="to quantize the weights of")
    return pack_weight(GroupedGemms.of_one(w, recipe), w, Noise(key), held, step)


def gather_experts(
    w: jax.Array, packed: PackedWeight, gather: Gather, *, recipe: Recipe
) -> PackedWeight:
    """Brings weights that are spread over devices together, as codes.

    Args:
      w: [e, k, n], where it is stored.
      packed: from `pack_experts`, likewise.
      gather: where that is, and where products want it; groups may stay apart.
      recipe: of the calls.

    Returns:
      What `grouped_dot` takes as `packed_w`, which needs no other w: what is not
      quantized is cast before it is gathered.
    """

    def moved(operand: Any) -> Any:
        if operand is not None:
            return gather.packed(operand)
        return gather.cast(lax.stop_gradient(w), COMPUTE[recipe.compute])

    of_fprop = recipe.source == "fprop"  # dgrad then starts from what fprop has
    dgrad = None if of_fprop and packed.dgrad is None else moved(packed.dgrad)
    return dataclasses.replace(packed, fprop=moved(packed.fprop), dgrad=dgrad)


def part_of_experts(packed: PackedWeight, count: int) -> PackedWeight:
    """Returns packed weights whose arrays are those of `count` groups of all."""

    def part(operand: Any) -> Any:
        if not isinstance(operand, PackedOperand):
            return operand
        return dataclasses.replace(
            operand,
            shape=(count, *operand.shape[1:]),
            blocked_shape=(count, *operand.blocked_shape[1:]),
        )

    return dataclasses.replace(
        packed,
        fprop=part(packed.fprop),
        dgrad=part(packed.dgrad),
        shape=(count, *packed.shape[1:]),
    )


def _check_packed(packed: PackedOperand | None, recipe: Recipe) -> None:
    site = recipe.packed_site if recipe.residuals == "packed" else None
    expected = None if site is None else recipe.sites[site]
    if packed is not None and packed.quantizer != expected:
        raise ValueError(
            "ragged_dot: packed must be made by the recipe of the call, got one of "
            f"{packed.quantizer} instead of {expected}."
        )


def _check_packed_w(packed: PackedWeight | None, recipe: Recipe) -> None:
    sites = ("fprop", Site.FPROP_W), ("dgrad", Site.DGRAD_W)
    for name, site in sites if packed is not None else ():
        operand = getattr(packed, name)
        made_by = getattr(operand, "quantizer", None)
        if made_by is not None and made_by != recipe.sites[site]:
            raise ValueError(
                "ragged_dot: packed_w must be made by the recipe of the call, got one "
                f"whose {name} is of {made_by} instead of {recipe.sites[site]}."
            )
