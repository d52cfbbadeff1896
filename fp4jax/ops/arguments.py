"""What the arguments of every quantized product must be."""

from typing import Any

import jax
import jax.numpy as jnp

from fp4jax.numerics import Site, checks
from fp4jax.ops import native
from fp4jax.recipes import Recipe


def check_none(caller: str, **arguments: Any) -> None:
    """Raises for arguments that a product without a recipe would drop."""
    if given := [name for name, value in arguments.items() if value is not None]:
        raise ValueError(
            f"{caller}: {', '.join(arguments)} must be None with recipe=None, which "
            f"quantizes nothing, got {', '.join(given)}. Leave them out, or pass a "
            "recipe."
        )


def check_recipe(recipe: Any, caller: str) -> None:
    """Raises TypeError for what is no recipe, such as its name."""
    if not isinstance(recipe, Recipe):
        raise TypeError(f"{caller}: recipe must be a Recipe, got {recipe!r}.")


def check_operands(recipe: Recipe, key: Any, caller: str, **operands: Any) -> None:
    """Raises for operands that are not float, a key that is none, a missing device."""
    for name, x in operands.items():
        checks.check_float(x, caller, name=name)
    checks.check_key(key, caller)
    if recipe.compute == "native":
        native.check_device()


def check_drawn(recipe: Recipe, key: Any, caller: str, *sites: Site, why: str) -> None:
    """Raises ValueError where sites draw, by default any, and there is no key.

    Args:
      recipe: of the call.
      key: the argument of `caller`.
      caller: the function whose argument it is.
      *sites: what is about to be quantized.
      why: what for, between "a PRNG key" and "a recipe".
    """
    if key is None and recipe.draws(*sites):
        raise ValueError(
            f"{caller}: key must be a PRNG key {why} a recipe that draws random "
            "numbers, got key=None. Pass key=..., a new one at every step; in a Flax "
            "NNX model call fp4jax.nnx.set_step(model, step) inside the training step, "
            "before each gradient that is taken; to a Linen model give rngs={'quant': "
            "key}, which its nn.scan and nn.vmap split."
        )


def checked_step(
    recipe: Recipe,
    held: Any,
    step: Any,
    *,
    caller: str,
    groups: int | None = None,
) -> jax.Array | None:
    """Returns the step in int32; raises ValueError for state that is not the recipe's.

    Args:
      recipe: of the call.
      held: the argument of `caller`.
      step: likewise; only with `held`.
      caller: the function whose arguments they are.
      groups: number of layers that have amaxes each, or None for one layer.
    """
    if held is None:
        if step is not None:
            raise ValueError(
                f"{caller}: step must be None without held, the amaxes that it says "
                f"when to sample, got step={step!r}. Pass held, or leave step out."
            )
        return None
    if not recipe.holds:
        raise ValueError(
            f"{caller}: held must be None for a recipe without held tensor scales, "
            f"got held of shape={jnp.shape(held)}. It is the state of another recipe."
        )
    shape, dtype = getattr(held, "shape", None), getattr(held, "dtype", None)
    expected = (3,) if groups is None else (groups, 3)
    if shape != expected or not (dtype == jnp.float32 or _adds_by_maximum(dtype)):
        raise ValueError(
            f"{caller}: held must be float32{list(expected)}, the amaxes of x, w and "
            f"dy, or that in Flax's dtype fp32_max_grad, got {type(held).__name__} of "
            f"shape={shape}, dtype={dtype}."
        )
    if step is None:
        return None
    check_integer(step, caller, name="step")
    return jnp.asarray(step, jnp.int32)


def check_integer(value: Any, caller: str, *, name: str) -> None:
    """Raises ValueError, in the caller's name, unless a value is one integer."""
    shape, dtype = jnp.shape(value), jnp.result_type(value)
    if shape or not jnp.issubdtype(dtype, jnp.integer):
        raise ValueError(
            f"{caller}: {name} must be one integer, got {name}={value!r} "
            f"(shape={shape}, dtype={dtype})."
        )


def _adds_by_maximum(dtype: Any) -> bool:
    """Returns whether a dtype is Flax's, or another that converts to float32."""
    extended, keys = jax.dtypes.extended, jax.dtypes.prng_key
    return jnp.issubdtype(dtype, extended) and not jnp.issubdtype(dtype, keys)
