"""Random Hadamard transform (RHT) of the contraction axis of a GEMM.

    H' = diag(eps) H_n / sqrt(n),   x -> x H',   x H' (y H')^T = x y^T

H_n is Sylvester's matrix, H[i, j] = (-1)^popcount(i & j), and eps a vector of signs. It
is applied to consecutive runs of n.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from fp4jax.numerics import blocks, checks, random_bits

_SIZES = (2, 4, 8, 16, 32, 64, 128, 256)


@dataclasses.dataclass(frozen=True)
class FixedSigns:
    """One sign vector for the whole run, drawn from a seed in [0, 2^32)."""

    seed: int = 0

    def __post_init__(self):
        if not checks.is_integer(self.seed) or not 0 <= self.seed < 2**32:
            raise ValueError(
                "FixedSigns: seed must be an integer in [0, 2^32), got "
                f"seed={self.seed!r}."
            )


@dataclasses.dataclass(frozen=True)
class PerStepSigns:
    """A new sign vector for every key, shared by the two operands of a GEMM."""


@dataclasses.dataclass(frozen=True)
class Hadamard:
    """A random Hadamard transform.

    Attributes:
      size: length n of a run: a power of two from 2 to 256.
      signs: `FixedSigns`, `PerStepSigns`, or `size` explicit signs of +1 and -1.
    """

    size: int = 16
    signs: FixedSigns | PerStepSigns | tuple[int, ...] = FixedSigns()

    def __post_init__(self):
        size, signs = self.size, self.signs
        if not checks.is_integer(size) or size not in _SIZES:
            raise ValueError(
                "Hadamard: size must be an integer power of two from 2 to 256, got "
                f"size={size!r}."
            )
        if isinstance(signs, FixedSigns | PerStepSigns):
            return
        if not isinstance(signs, tuple):
            raise TypeError(
                "Hadamard: signs must be FixedSigns, PerStepSigns or a tuple, got "
                f"signs={signs!r}."
            )
        are_signs = (checks.is_integer(sign) and abs(sign) == 1 for sign in signs)
        if len(signs) != size or not all(are_signs):
            raise ValueError(
                f"Hadamard: signs must be {size} values of +1 and -1, got "
                f"signs={signs}."
            )

    @property
    def draws(self) -> bool:
        """Whether the sign vector depends on the call's key."""
        return isinstance(self.signs, PerStepSigns)


# The fixed vector of NVIDIA's published NVFP4 recipe.
NVFP4_SIGNS = (1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1)


def sign_vector(hadamard: Hadamard, key: jax.Array | None, stream: int) -> jax.Array:
    """Returns the float32 signs eps of a transform, [size].

    Args:
      hadamard: the transform.
      key: the call's key; read by `PerStepSigns` only.
      stream: stream of the key; both operands of a GEMM must name the same.
    """
    signs = hadamard.signs
    if isinstance(signs, tuple):
        return jnp.asarray(signs, jnp.float32)
    if isinstance(signs, FixedSigns):
        words = jnp.uint32(signs.seed), jnp.uint32(0)
    else:
        assert key is not None
        words = random_bits.key_words(key, stream)
    position = jnp.arange(hadamard.size, dtype=jnp.uint32)
    bits = random_bits.uniform16(words, jnp.uint32(0), position)
    return jnp.where(bits < 2**15, jnp.float32(1), jnp.float32(-1))


def signs_of(
    hadamard: Hadamard, key: jax.Array | None, stream: int
) -> tuple[float, ...] | jax.Array:
    """Returns `sign_vector`, as numbers where no key is drawn from."""
    if hadamard.draws:
        return sign_vector(hadamard, key, stream)
    return _fixed_signs(hadamard)


@functools.cache
def _fixed_signs(hadamard: Hadamard) -> tuple[float, ...]:
    """Returns the signs of a transform that draws none as numbers.

    Also inside of `jax.shard_map`, where arrays that a program computes are parts. Once
    known they are not computed again, as when a compiler asks for a device's part.
    """
    nowhere = jax.sharding.AbstractMesh((), ())
    with jax.ensure_compile_time_eval(), jax.sharding.use_abstract_mesh(nowhere):
        return tuple(np.asarray(sign_vector(hadamard, None, 0)).tolist())


def rotate(x: jax.Array, signs: jax.Array, axis: int) -> jax.Array:
    """Returns x H' along an axis whose size is a multiple of n.

    Args:
      x: float32, bfloat16 or float16 array. From bfloat16, n products of +-1 are
        summed in float32, in any order: sums are exact unless the nonzero magnitudes
        of a run span more than 2^16 / n. From float32 and float16 the order is that of
        the butterflies (a, b) -> (a + b, a - b) at distances 1, 2, 4, ..., n/2, so that
        all backends agree.
      signs: float32 [n].
      axis: the contraction axis.

    Returns:
      Float32 array of the same shape.
    """
    axis = axis % x.ndim
    transform = _matmul
    if x.dtype != jnp.bfloat16:
        x, transform = x.astype(jnp.float32), _butterflies
    runs = blocks.split_axis(x, axis, signs.size)
    runs = transform(_signed(runs, signs.astype(x.dtype), axis), axis + 1)
    return blocks.join_axes(_scaled(runs, signs.size), axis)


def rotate_back(x: jax.Array, signs: jax.Array, axis: int) -> jax.Array:
    """Returns x H'^T, the inverse of `rotate`, of a float32 array."""
    axis = axis % x.ndim
    runs = blocks.split_axis(x, axis, signs.size)
    runs = _scaled(_butterflies(runs, axis + 1), signs.size)
    return blocks.join_axes(_signed(runs, signs, axis), axis)


def norm(size: int) -> float:
    """Returns 1 / sqrt(size) in float32."""
    return float(np.float32(1 / math.sqrt(size)))


def matrix(size: int) -> np.ndarray:
    """Returns Sylvester's H_n, int8 entries +-1, not normalized."""
    h = np.ones((1, 1), np.int8)
    while h.shape[0] < size:
        h = np.block([[h, h], [h, -h]])
    return h


def _signed(runs: jax.Array, signs: jax.Array, axis: int) -> jax.Array:
    return runs * lax.broadcast_in_dim(signs, runs.shape, (axis + 1,))


def _scaled(runs: jax.Array, size: int) -> jax.Array:
    return runs * np.float32(norm(size))


def _matmul(runs: jax.Array, axis: int) -> jax.Array:
    runs = runs.astype(jnp.float32)
    h = jnp.asarray(matrix(runs.shape[axis]), jnp.float32)
    out = jnp.tensordot(runs, h, axes=((axis,), (0,)), precision=lax.Precision.HIGHEST)
    return jnp.moveaxis(out, -1, axis)


def _butterflies(runs: jax.Array, axis: int) -> jax.Array:
    size = runs.shape[axis]
    before, after = runs.shape[:axis], runs.shape[axis + 1 :]
    distance = 1
    while distance < size:
        pairs = runs.reshape(*before, size // (2 * distance), 2, distance, *after)
        a, b = (lax.index_in_dim(pairs, i, axis + 1, keepdims=False) for i in (0, 1))
        runs = jnp.stack([a + b, a - b], axis + 1)
        distance *= 2
        runs = runs.reshape(*before, size, *after)
    return runs
