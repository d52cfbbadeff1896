"""`lax.dot_general` whose three training GEMMs are quantized as a recipe says."""

import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from fp4jax.numerics import Site
from fp4jax.numerics.manual import varying_as
from fp4jax.ops import encoded
from fp4jax.ops.arguments import (
    check_drawn,
    check_none,
    check_operands,
    check_recipe,
    checked_step,
)
from fp4jax.ops.dims import DimensionNumbers, Dims
from fp4jax.ops.gather import Gather
from fp4jax.ops.gemms import NO_AMAXES, Gemms
from fp4jax.ops.noise import Noise, check_microbatch
from fp4jax.ops.observer import observed
from fp4jax.ops.residuals import PackedOperand, PackedWeight
from fp4jax.ops.vjp import fp4_dot, pack_weight
from fp4jax.recipes import Recipe


def dot_general(
    lhs: jax.Array,
    rhs: jax.Array,
    dimension_numbers: DimensionNumbers,
    precision: Any = None,
    preferred_element_type: Any = None,
    *,
    out_sharding: Any = None,
    recipe: Recipe | None = None,
    key: jax.Array | None = None,
    weight: Literal["lhs", "rhs"] = "rhs",
    held: jax.Array | None = None,
    step: jax.Array | int | None = None,
    microbatch: jax.Array | int | None = None,
    packed: PackedOperand | None = None,
    packed_w: PackedWeight | None = None,
    gather: Gather | None = None,
) -> jax.Array:
    """Computes a `lax.dot_general` whose forward and backward operands are quantized.

    y = Q(x) Q(w),  dx = Q(dy) Q(w)^T,  dw = Q(x)^T Q(dy)

    Each of the six Q is the recipe's quantizer of that site, along the axis that its
    GEMM contracts; operands are quantized from the dtype that arrives. Sums are
    float32. A gradient is the product of its quantized operands, not the derivative of
    the quantized forward pass, and has its operand's dtype.

    Works under jit, vmap, scan, remat and reverse-mode differentiation of first order;
    forward mode (`jax.jvp`) is not defined. Under `jax.vmap` an unbatched key gives
    every lane the same noise, and every lane has its own amax. Inside of
    `jax.shard_map` a device's parts are operands of their own, noise included; the
    gradient of one that devices share is their sum.

    Args:
      lhs: float32, bfloat16 or float16 array, x unless `weight` is "lhs".
      rhs: likewise, w unless `weight` is "lhs"; may differ from `lhs` in dtype.
      dimension_numbers: as for `lax.dot_general`.
      precision: as for `lax.dot_general`, of all three GEMMs.
      preferred_element_type: the dtype of the result.
      out_sharding: as for `lax.dot_general`, of the result; gradients have the sharding
        of their operand.
      recipe: what to quantize; None is `lax.dot_general` itself, which takes no `held`,
        `step`, `microbatch`, `packed`, `packed_w` or `gather`.
      key: Threefry key of this call, typed or raw uint32[2], read by recipes only, and
        of them by those that draw random numbers. Needed where a site of the forward
        pass draws, and to differentiate where any does.
      weight: which operand is w. It decides the quantizers, not the result's shape.
      held: float32[3], the held amaxes of x, w and dy, 0 where not yet seen: then taken
        of the tensor. Its cotangent is no derivative but the new state, in which an
        amax that is not finite never enters; a call that is not differentiated reads
        it only. Uses of one state add their cotangents, unless it is in Flax's dtype
        `fp32_max_grad`, which takes their maximum. None takes all amaxes of the tensor.
      step: int32 scalar, the training step, on which held amaxes are sampled; only with
        `held`.
      microbatch: integer scalar i: this call's m tokens, the free dimensions of x, are
        rows i m to (i + 1) m of a larger batch, and get the random bits that they have
        there. m must be whole blocks. Amaxes remain those of the call.
      packed: from `pack_x`, for recipes of packed residuals: one copy of what the
        backward pass needs of x, for all layers that take the same x.
      packed_w: from `pack_w`: w, which is `rhs`, as fprop and dgrad multiply by it, so
        that this call does not quantize it. The gradient is that of `rhs`.
      gather: where w, which is `rhs`, is spread over the mesh of the context, and how
        its products want it: each device quantizes its part, in the forward and in the
        backward pass, and codes are gathered. The gradient lies as w does.

    Returns:
      What `lax.dot_general` returns: [*batch, *lhs_free, *rhs_free].

    Raises:
      ValueError: a recipe that draws, without a key; several keys; a bad `weight`;
        `held`, `step`, `microbatch`, `packed`, `packed_w` or `gather` that do not fit
        the recipe or the operands.
      TypeError: operands that are not float, or whose dimensions do not match; a key
        that is none, or of another implementation than Threefry.
      NotImplementedError: a second derivative.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from fp4jax import recipes
      >>> x, w = jnp.ones((4, 32), jnp.bfloat16), jnp.ones((32, 8))
      >>> dims = (((1,), (0,)), ((), ()))
      >>> y = dot_general(x, w, dims, recipe=recipes.ufp4(), key=jax.random.key(0))
      >>> y.shape, y.dtype
      ((4, 8), dtype('float32'))
    """
    if weight not in ("lhs", "rhs"):
        raise ValueError(
            f"dot_general: weight must be 'lhs' or 'rhs', got weight={weight!r}."
        )
    lax_dot = functools.partial(
        lax.dot_general,
        dimension_numbers=dimension_numbers,
        precision=precision,
        preferred_element_type=preferred_element_type,
        out_sharding=out_sharding,
    )
    if recipe is None:
        check_none(
            "dot_general",
            held=held,
            step=step,
            microbatch=microbatch,
            packed=packed,
            packed_w=packed_w,
            gather=gather,
        )
        return lax_dot(lhs, rhs)
    lhs, rhs = jnp.asarray(lhs), jnp.asarray(rhs)
    check_recipe(recipe, "dot_general")
    out = jax.eval_shape(lax_dot, lhs, rhs)  # checks the dimensions as lax does
    check_operands(recipe, key, "dot_general", lhs=lhs, rhs=rhs, result=out)
    fprop = Site.FPROP_X, Site.FPROP_W
    check_drawn(recipe, key, "dot_general", *fprop, why="for the forward pass of")
    step = checked_step(recipe, held, step, caller="dot_general")
    if recipe.compute == "native" and (precision, out_sharding) != (None, None):
        raise ValueError(
            "dot_general: precision and out_sharding must be None with "
            f"compute='native', got precision={precision}, out_sharding="
            f"{out_sharding}."
        )
    lhs, rhs = varying_as((lhs, rhs), key, held, microbatch, packed, packed_w)
    dims = Dims.of(dimension_numbers)
    lhs, rhs = dims.canonical_lhs(lhs), dims.canonical_rhs(rhs)
    gemms = Gemms(
        recipe,
        batch=len(dims.lhs_batch),
        weight=weight,
        precision=precision,
        dtype=out.dtype,
        out_sharding=out_sharding,
        lhs=jax.typeof(lhs),
        rhs=jax.typeof(rhs),
        gather=gather,
    )
    _check_gather(gemms)
    check_microbatch(
        microbatch,
        recipe,
        tokens=gemms.tokens,
        batch=gemms.batch,
        caller="dot_general",
    )
    noise = Noise.of(key, microbatch, tokens=gemms.tokens)
    _check_packed(gemms, packed, rhs if weight == "lhs" else lhs, noise)
    _check_packed_w(gemms, packed_w, rhs, noise, held, step)
    if packed is None:
        gemms = encoded.where_it_can(gemms, packed_w)
    with observed(gemms):
        return fp4_dot(gemms, lhs, rhs, noise, held, step, packed, packed_w)


def pack_x(
    x: jax.Array,
    *,
    recipe: Recipe,
    key: jax.Array | None = None,
    microbatch: jax.Array | int | None = None,
) -> PackedOperand:
    """Packs what the backward pass of a linear layer needs of its input.

    Layers that take the same x under recipes that quantize it alike may share the
    result: give it to each `dot_general` as `packed`, and one copy is saved.

    Args:
      x: [*m, k], of products that contract its last axis.
      recipe: of packed residuals.
      key: of recipes whose packed x draws; layers then have the noise in common.
      microbatch: as for `dot_general`.

    Raises:
      ValueError: a recipe whose residuals are not packed, or whose x has a held amax,
        which is each layer's own.
      TypeError: no recipe; an x that is not float; a key as for `dot_general`.

    Example:
      >>> import dataclasses
      >>> from fp4jax import recipes
      >>> recipe = dataclasses.replace(recipes.ufp4(), residuals="packed")
      >>> pack_x(jnp.ones((32, 64), jnp.bfloat16), recipe=recipe).codes.shape
      (16, 64)
    """
    check_recipe(recipe, "pack_x")
    if recipe.residuals != "packed" or recipe.every[0] is not None:
        raise ValueError(
            "pack_x: recipe must have residuals='packed' and no held amax of x, got "
            f"residuals={recipe.residuals!r}, every={recipe.every}."
        )
    x = jnp.asarray(x)
    check_operands(recipe, key, "pack_x", x=x)
    gemms = Gemms.of_one(x, recipe)
    check_microbatch(
        microbatch, recipe, tokens=gemms.tokens, batch=gemms.batch, caller="pack_x"
    )
    noise = Noise.of(key, microbatch, tokens=gemms.tokens)
    return gemms.pack(x, noise, NO_AMAXES)


def pack_w(
    w: jax.Array,
    *,
    recipe: Recipe,
    key: jax.Array | None = None,
    held: jax.Array | None = None,
    step: jax.Array | int | None = None,
) -> PackedWeight:
    """Quantizes a weight once, for several calls of `dot_general`.

    Each is given the result as `packed_w`, beside the weight itself, which its gradient
    is of. Where the recipe draws for w, the calls have one draw in common, as they have
    w; where it holds the amax of w, that is sampled here.

    Args:
      w: [k, *n], of products that contract its first axis.
      recipe: of the calls.
      key: of the calls; needed where a site of w draws.
      held: of the calls.
      step: of the calls.

    Raises:
      ValueError, TypeError: as `dot_general`.

    Example:
      >>> from fp4jax import recipes
      >>> x, w, recipe = jnp.ones((4, 32)), jnp.ones((32, 8)), recipes.ufp4()
      >>> dims = (((1,), (0,)), ((), ()))
      >>> packed = pack_w(w, recipe=recipe)
      >>> dot_general(x, w, dims, recipe=recipe, packed_w=packed).shape
      (4, 8)
    """
    w = jnp.asarray(w)
    check_recipe(recipe, "pack_w")
    check_operands(recipe, key, "pack_w", w=w)
    step = checked_step(recipe, held, step, caller="pack_w")
    of_w = Site.FPROP_W, Site.DGRAD_W
    check_drawn(recipe, key, "pack_w", *of_w, why="to quantize the weight of")
    return pack_weight(Gemms.of_one(w, recipe), w, Noise(key), held, step)


def _check_packed(gemms: Gemms, packed: Any, x: jax.Array, noise: Noise) -> None:
    if packed is None:
        return
    if gemms.recipe.residuals != "packed":
        raise ValueError(
            "dot_general: packed must be None unless the recipe's residuals are "
            f"'packed', got residuals={gemms.recipe.residuals!r}."
        )
    expected = jax.eval_shape(lambda: gemms.pack(x, noise, NO_AMAXES))
    if jax.tree.structure(packed) != jax.tree.structure(expected):
        raise ValueError(
            "dot_general: packed must be what pack_x makes of this x and recipe, got "
            f"{jax.tree.structure(packed)} instead of {jax.tree.structure(expected)}."
        )


def _check_gather(gemms: Gemms) -> None:
    if gemms.gather is None:
        return
    if gemms.weight != "rhs" or gemms.batch or len(gemms.rhs.shape) != 2:
        raise ValueError(
            "dot_general: gather must be None unless w is rhs, a matrix, got "
            f"weight={gemms.weight!r}, {gemms.batch} batch dimensions and w of "
            f"shape={gemms.rhs.shape}."
        )


def _check_packed_w(
    gemms: Gemms,
    packed_w: Any,
    w: jax.Array,
    noise: Noise,
    held: jax.Array | None,
    step: jax.Array | None,
) -> None:
    if packed_w is None:
        return
    if gemms.weight != "rhs" or gemms.batch:
        raise ValueError(
            "dot_general: packed_w must be None unless w is rhs and there are no batch "
            f"dimensions, got weight={gemms.weight!r} and {gemms.batch} of them."
        )
    expected = jax.eval_shape(lambda: pack_weight(gemms, w, noise, held, step))
    if jax.tree.structure(packed_w) != jax.tree.structure(expected):
        raise ValueError(
            "dot_general: packed_w must be what pack_w makes of this w and recipe, got "
            f"{jax.tree.structure(packed_w)} instead of {jax.tree.structure(expected)}."
        )
