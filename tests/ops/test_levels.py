"""By which powers of two a pair of operands may be multiplied."""

import jax.numpy as jnp
import numpy as np
import pytest

from fp4jax.numerics import E2M1, UNIFORM
from fp4jax.ops import fp8
from fp4jax.ops.levels import Levels, balance


def drawn(low, high, zeros, seed):
    rng = np.random.default_rng(seed)
    exponent = rng.integers(low, high + 1, (4, 6), dtype=np.int32)
    is_zero = rng.random((4, 6)) < zeros
    return Levels(jnp.asarray(exponent), jnp.asarray(is_zero), jnp.bool_(True))


def fit(levels, grid, power):
    """Whether all of it lies in the range of E4M3 when it is multiplied."""
    moved = np.asarray(levels.exponent)[~np.asarray(levels.is_zero)] + power
    top = fp8.shift(grid)
    return bool(np.all((moved <= top) & (moved >= top - fp8.window(grid))))


@pytest.mark.parametrize("zeros", [0, 0.7, 1])
@pytest.mark.parametrize(
    ("of_a", "of_b"),
    [
        ((-3, 2), (-9, -5)),
        ((-12, 6), (-2, 2)),
        ((-60, -50), (40, 50)),
        ((-9, 5), (-9, 5)),
    ],
)
def test_what_cancels_fits_both_and_is_found_if_anything_does(of_a, of_b, zeros):
    grids = E2M1, UNIFORM
    pair = [drawn(*of, zeros, seed) for seed, of in enumerate((of_a, of_b))]
    power, cancels = balance(*pair, grids)
    fits = lambda p: all(
        fit(x, grid, q) for x, grid, q in zip(pair, grids, (p, -p), strict=True)
    )
    if zeros < 1:
        assert bool(cancels) == any(fits(p) for p in range(-130, 130))
    if cancels:
        assert fits(int(power))
