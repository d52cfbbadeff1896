"""What the arguments of every quantized product must be."""

from typing import Any

import jax
import jax.numpy as jnp

from fp4jax.numerics import checks
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


def check_held(
    recipe: Recipe,
    held: Any,
    step: Any,
    *,
    caller: str,
    groups: int | None = None,
) -> None:
    """Raises ValueError for state that is not the recipe's, and for a step without.

    Args:
      recipe: of the call.
      held: the argument of `caller`.
      step: likewise.
      caller: the function whose arguments they are.
      groups: number of layers that have amaxes each, or None for one layer.
    """
    if held is None:
        if step is not None:
            raise ValueError(
                f"{caller}: step must be None without held, the amaxes that it says "
                f"when to sample, got step={step!r}. Pass held, or leave step out."
            )
        return
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
    if step is not None and (
        jnp.shape(step) != () or not jnp.issubdtype(jnp.result_type(step), jnp.integer)
    ):
        raise ValueError(f"{caller}: step must be one integer, got step={step!r}.")


def _adds_by_maximum(dtype: Any) -> bool:
    """Returns whether a dtype is Flax's, or another that converts to float32."""
    extended, keys = jax.dtypes.extended, jax.dtypes.prng_key
    return jnp.issubdtype(dtype, extended) and not jnp.issubdtype(dtype, keys)
