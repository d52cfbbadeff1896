"""Keys, axes and dtypes that public functions refuse, and those that they take."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import fp4jax
from fp4jax import recipes
from fp4jax.numerics import checks
from tests.numerics.cases import ALL

X = jnp.ones((2, 16))
MATMUL = (((1,), (1,)), ((), ()))
CALLS = {
    "quantize": lambda key, q=ALL["uniform-f32"]: fp4jax.quantize(X, q, key=key),
    "dot_general": lambda key: fp4jax.dot_general(
        X, X, MATMUL, recipe=recipes.bf16(), key=key
    ),
}
# Also where the quantizer or recipe draws nothing.
INVALID = {
    "seed": (lambda: 0, TypeError, r"typed or raw uint32\[2\], got key of 0"),
    "float": (lambda: jnp.ones(2), TypeError, r"got key of dtype=float32 \(shape=\(2,"),
    "int32": (lambda: np.zeros(2, np.int32), TypeError, "got key of dtype=int32"),
    "typed-batch": (
        lambda: jax.random.split(jax.random.key(0), 3),
        ValueError,
        r"one PRNG key, .*, got key of shape=\(3,\) \(dtype=key<fry>\).* jax.vmap",
    ),
    "raw-batch": (
        lambda: jnp.zeros((3, 2), jnp.uint32),
        ValueError,
        r"one PRNG key, .*, got key of shape=\(3, 2\) \(dtype=uint32\)",
    ),
    "raw-words": (
        lambda: jnp.zeros(4, jnp.uint32),
        ValueError,
        r"raw uint32\[2\], got key of shape=\(4,\)",
    ),
    "rbg": (
        lambda: jax.random.key(0, impl="rbg"),
        TypeError,
        "of the implementation 'threefry2x32', got 'rbg'",
    ),
    "unsafe-rbg": (
        lambda: jax.random.key(0, impl="unsafe_rbg"),
        TypeError,
        "of the implementation 'threefry2x32', got 'unsafe_rbg'",
    ),
}


@pytest.mark.parametrize("caller", CALLS)
@pytest.mark.parametrize(("make", "error", "message"), INVALID.values(), ids=INVALID)
def test_bad_keys_raise(caller, make, error, message):
    key = make()
    with pytest.raises(error, match=f"^{caller}: key must be .*{message}"):
        CALLS[caller](key)


@pytest.mark.parametrize("caller", CALLS)
def test_one_key_is_taken_in_every_guise(caller):
    typed, raw = jax.random.key(0), jax.random.PRNGKey(0)
    for key in (None, typed, raw, np.asarray(raw)):
        jax.eval_shape(lambda key=key: CALLS[caller](key))
    for keys in (jax.random.split(typed, 3), jax.random.split(raw, 3)):
        jax.eval_shape(jax.vmap(CALLS[caller]), keys)


def test_axes_count_from_both_ends():
    axes = [checks.checked_axis(X, axis, caller="f") for axis in (-2, -1, 0, 1)]
    assert axes == [0, 1, 0, 1]


@pytest.mark.parametrize("axis", [2, -3, 1.0, None, True])
def test_bad_axes_raise(axis):
    with pytest.raises(ValueError, match=r"^f: axis must be an integer in \[-2, 2\)"):
        checks.checked_axis(X, axis, caller="f")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_floats_are_taken(dtype):
    checks.check_float(X.astype(dtype), "f", name="x")


@pytest.mark.parametrize("dtype", ["int32", "complex64", "float8_e4m3fn"])
def test_other_dtypes_raise(dtype):
    with pytest.raises(TypeError, match=f"^f: x must be .*, got dtype={dtype}"):
        checks.check_float(X.astype(dtype), "f", name="x")
