"""Arrays of the distributions that are quantized, float32, drawn by numpy."""

from collections.abc import Callable

import numpy as np


def gauss(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Standard normal."""
    return rng.standard_normal(shape)


def laplace(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Double exponential."""
    return rng.laplace(size=shape)


def student(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Student's t with 3 degrees of freedom: no fourth moment."""
    return rng.standard_t(3, size=shape)


def channels(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Normal, with every 64th column 20 times as large."""
    x = rng.standard_normal(shape)
    x[:, ::64] *= 20
    return x


def spikes(rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Normal, with each element 100 times as large with a chance of 0.5%."""
    x = rng.standard_normal(shape)
    return np.where(rng.random(shape) < 0.005, 100 * x, x)


DISTRIBUTIONS: dict[str, Callable[..., np.ndarray]] = {
    "gauss": gauss,
    "laplace": laplace,
    "student": student,
    "channels": channels,
    "spikes": spikes,
}


def draw(name: str, shape: tuple[int, int], *, seed: int) -> np.ndarray:
    """Returns a float32 array of a distribution, the same for a seed."""
    rng = np.random.default_rng(seed)
    return DISTRIBUTIONS[name](rng, shape).astype(np.float32)
