"""Quantized products of Linen layers, with their keys."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any

import flax
import jax
import jax.numpy as jnp
from flax import linen as nn
from flax.core import lift
from jax import lax

from fp4jax.linen.state import OVERWRITE_WITH_GRADIENT, advance, whole
from fp4jax.ops.dot_general import DimensionNumbers, dot_general
from fp4jax.ops.einsum import einsum_with, parse
from fp4jax.recipes import Recipe

RNG = "quant"


class DotGeneral(nn.Module):
    """A `fp4jax.dot_general` that draws from the RNG stream "quant".

    Give `apply` a new key at every step, `rngs={"quant": key}`. Each layer, each call
    of a layer, and each layer of an `nn.scan` then draws noise of its own; that of a
    recomputation under `nn.remat` is the same. Without the stream there is no key:
    evaluation needs none, and differentiating a recipe that draws raises. Where a batch
    is processed in parts, give each a key of its own: what is drawn is then as random
    as, but not the same as for the whole batch, which `fp4jax.nnx.set_step` can do.

    A recipe that holds amaxes has them in the collection "_overwrite_with_gradient",
    whose gradient is its next value: train with `fp4jax.linen.value_and_grad` or with
    Flax's `TrainState`, never by an optimizer over all variables.

    Attributes:
      recipe: what to quantize.

    Raises:
      ValueError: noise would repeat: an `nn.scan` or `nn.vmap` around it does not split
        "quant", or the key is a constant of the compiled function.
    """

    recipe: Recipe

    @nn.compact
    def __call__(
        self,
        lhs: jax.Array,
        rhs: jax.Array,
        dimension_numbers: DimensionNumbers,
        precision: Any = None,
        preferred_element_type: Any = None,
        *,
        out_sharding: Any = None,
    ) -> jax.Array:
        """Computes `fp4jax.dot_general` with this layer's recipe and key."""
        dot = functools.partial(
            dot_general,
            lhs,
            rhs,
            dimension_numbers,
            precision,
            preferred_element_type,
            out_sharding=out_sharding,
            recipe=self.recipe,
            key=self._key(),
        )
        if not self.recipe.holds:
            return dot()
        zeros = functools.partial(jnp.zeros, dtype=jnp.float32)
        held = self.variable(OVERWRITE_WITH_GRADIENT, "held", zeros, 3)
        step = self.variable(OVERWRITE_WITH_GRADIENT, "step", zeros, ())
        return advance(dot(held=held.value, step=whole(step.value)), step.value)

    def _key(self) -> jax.Array | None:
        if not self.recipe.draws():
            return None
        if self.has_rng(RNG):
            _check_varies(self)
            _check_split(self)
            return self.make_rng(RNG)
        # What a model computes while it is initialized only has to have a shape.
        initializing = self.is_initializing() and self.has_rng("params")
        return self.make_rng("params") if initializing else None


def _check_varies(module: Any) -> None:
    """Raises for a key that a compiled function would use at every call."""
    is_compiling = isinstance(jnp.zeros(()), jax.core.Tracer)
    is_constant = not isinstance(module.scope.rngs[RNG].rng, jax.core.Tracer)
    if is_compiling and is_constant and not module.is_initializing():
        raise ValueError(
            f"DotGeneral: the key of {RNG!r} must be an argument of the compiled "
            "function, or every call of it draws the same noise, got a constant. Pass "
            "it, or a step to fold into it, to the function that jax.jit compiles."
        )


def _check_split(module: Any) -> None:
    """Raises if a lifted loop around a module hands its key on without a split.

    A module sees the key that it is given, behind an `nn.remat` as a new array, so only
    the loops themselves know: these are calls of Flax's `lift.scan` and `lift.vmap` on
    the stack, whose names the scopes carry.
    """
    seen, frame = 0, inspect.currentframe()
    while frame := frame and frame.f_back:
        if frame.f_globals.get("__name__") != lift.__name__:
            continue
        local = frame.f_locals
        if "rng_splits" not in local:
            continue
        seen += 1
        for scopes, split in zip(local["rng_groups"], local["rng_splits"], strict=True):
            if not split and any(RNG in rngs for rngs in scopes):
                raise ValueError(
                    f"DotGeneral: split_rngs must have {{{RNG!r}: True}} in nn.scan "
                    "and nn.vmap, or every layer draws the same noise, got False "
                    f"around {'/'.join(module.path)!r}."
                )
    names = "".join(module.scope.debug_path)
    if seen < names.count("scan(") + names.count("vmap("):
        raise RuntimeError(
            "DotGeneral: Flax's loops must keep rng_splits in their frames, or it is "
            f"not known whether {'/'.join(module.path)!r} repeats noise, got those of "
            f"Flax {flax.__version__}. Use a version that fp4jax was tested with."
        )


@dataclasses.dataclass(frozen=True)
class _Factory:
    """Makes the `DotGeneral` of a layer; equal where the recipe is."""

    recipe: Recipe

    def __call__(self, *args: Any, **kwargs: Any) -> DotGeneral:
        if args or kwargs:
            raise TypeError(
                "dot_general_cls: must be given to a Linen layer as an argument whose "
                "name ends in dot_general_cls, got the operands of a dot_general. "
                "Write nn.Dense(..., dot_general_cls=dot_general_cls(recipe)); a layer "
                "of NNX takes dot_general=fp4jax.nnx.DotGeneral(recipe, rngs=rngs)."
            )
        return DotGeneral(self.recipe)


def dot_general_cls(recipe: Recipe) -> Callable[[], DotGeneral]:
    """Returns what a Linen layer takes as `dot_general_cls`.

    The layer's variables may have "_overwrite_with_gradient" beside "params": for how
    to train them, see `DotGeneral`.

    Args:
      recipe: what to quantize.

    Returns:
      A function that makes a `DotGeneral`, for `nn.Dense`, `nn.DenseGeneral`, and
      `nn.MultiHeadDotProductAttention` (`qkv_dot_general_cls`, `out_dot_general_cls`).

    Raises:
      TypeError: what is not a recipe.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from flax import linen as nn
      >>> from fp4jax import linen, recipes
      >>> layer = nn.Dense(8, dot_general_cls=linen.dot_general_cls(recipes.ufp4()))
      >>> x, key = jnp.ones((4, 32)), jax.random.key(0)
      >>> variables = jax.jit(layer.init)(key, x)
      >>> loss = lambda v, key: layer.apply(v, x, rngs={"quant": key}).sum()
      >>> jax.tree.map(jnp.shape, jax.jit(jax.grad(loss))(variables, key))
      {'params': {'bias': (8,), 'kernel': (32, 8)}}
    """
    if not isinstance(recipe, Recipe):
        raise TypeError(f"dot_general_cls: recipe must be a Recipe, got {recipe!r}.")
    return _Factory(recipe)


class Einsum(nn.Einsum):
    """An `nn.Einsum` whose product is quantized by a `DotGeneral`; its kernel is w.

    Attributes:
      recipe: what to quantize; None quantizes nothing.
    """

    recipe: Recipe | None = None

    @nn.compact
    def __call__(self, inputs: jax.Array, einsum_str: str | None = None) -> jax.Array:
        """Computes what `nn.Einsum` does; spec and result as in `fp4jax.einsum`."""
        return einsum_layer(self, self.recipe, inputs, einsum_str)


def einsum_layer(
    layer: Any,
    recipe: Recipe | None,
    inputs: jax.Array,
    einsum_str: str | None = None,
) -> jax.Array:
    """Computes an `nn.Einsum`, whose parameters it makes like Flax."""
    spec = nn.merge_param("einsum_str", layer.einsum_str, einsum_str)
    kernel = layer.param("kernel", layer.kernel_init, layer.shape, layer.param_dtype)
    (_, labels), out = parse(spec, jnp.ndim(inputs), len(layer.shape))
    sizes = dict(zip(labels, layer.shape, strict=True))
    bias_shape = tuple(sizes[label] for label in out if label in sizes)
    bias = None
    if layer.use_bias:
        bias = layer.param("bias", layer.bias_init, bias_shape, layer.param_dtype)
    arrays = layer.promote_dtype(inputs, kernel, bias, dtype=layer.dtype)
    dot = functools.partial(
        lax.dot_general if recipe is None else DotGeneral(recipe),
        precision=layer.precision,
        preferred_element_type=layer.preferred_element_type,
    )
    y = einsum_with(dot, spec, *arrays[:2])
    if arrays[2] is None:
        return y
    return y + arrays[2].reshape([sizes.get(label, 1) for label in out])
