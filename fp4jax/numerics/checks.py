"""Conditions on arguments that several public functions share, checked when traced."""

from typing import Any

import jax
import jax.numpy as jnp

_FLOATS = (jnp.float32, jnp.bfloat16, jnp.float16)


def check_float(x: jax.Array, caller: str, *, name: str) -> None:
    """Raises TypeError, in the caller's name, unless an array can be quantized."""
    if x.dtype not in _FLOATS:
        raise TypeError(
            f"{caller}: {name} must be float32, bfloat16 or float16, got "
            f"dtype={x.dtype} (shape={x.shape})."
        )


def checked_axis(x: jax.Array, axis: int, *, caller: str, name: str = "axis") -> int:
    """Returns an axis as a number that is not negative; raises ValueError if none."""
    if not is_integer(axis) or not -x.ndim <= axis < x.ndim:
        raise ValueError(
            f"{caller}: {name} must be an integer in [{-x.ndim}, {x.ndim}), got "
            f"{name}={axis!r} (shape={x.shape})."
        )
    return axis % x.ndim


def check_key(key: Any, caller: str) -> None:
    """Raises unless `key` is None or one PRNG key, typed or raw.

    Random bits are a function of two words of a key, so only Threefry keys, which have
    no more, are taken.

    Args:
      key: None, key<fry> [] or uint32 [2].
      caller: the public function that errors name.

    Raises:
      TypeError: no key, or one of another implementation.
      ValueError: several keys, or raw words that are not two.
    """
    if key is None:
        return
    shape, dtype = getattr(key, "shape", None), getattr(key, "dtype", None)
    is_typed = dtype is not None and jnp.issubdtype(dtype, jax.dtypes.prng_key)
    if not is_typed and dtype != jnp.uint32:
        got = repr(key) if dtype is None else f"dtype={dtype} (shape={shape})"
        raise TypeError(
            f"{caller}: key must be a PRNG key, typed or raw uint32[2], got key of "
            f"{got}. Use jax.random.key(seed)."
        )
    if is_typed and (name := str(jax.random.key_impl(key))) != "threefry2x32":
        raise TypeError(
            f"{caller}: key must be of the implementation 'threefry2x32', got "
            f"{name!r}. Use jax.random.key(seed, impl='threefry2x32')."
        )
    if shape != (() if is_typed else (2,)):
        raise ValueError(
            f"{caller}: key must be one PRNG key, typed or raw uint32[2], got key of "
            f"shape={shape} (dtype={dtype}). For a key each use jax.vmap."
        )


def is_integer(x: Any) -> bool:
    """Returns whether a value is an int, which a bool here is not."""
    return isinstance(x, int) and not isinstance(x, bool)
