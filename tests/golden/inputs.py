"""Input arrays of the golden files, the same on every machine and numpy version.

Only integer arithmetic, IEEE-exact float64 operations (+, *, /, sqrt) and the raw words
of PCG64, whose stream is frozen, are used: no libm, no distribution of numpy's
`Generator`, whose streams may change.
"""

import hashlib
import pathlib

import ml_dtypes
import numpy as np

HERE = pathlib.Path(__file__).parent


def bell(seed: int, shape: tuple[int, ...]) -> np.ndarray:
    """Nearly normal float64 of mean 0 and variance 1: a sum of 12 uniforms."""
    count = int(np.prod(shape))
    words = np.random.PCG64(seed).random_raw(6 * count)
    halves = np.stack([words & np.uint64(0xFFFFFFFF), words >> np.uint64(32)])
    total = halves.astype(np.int64).reshape(2, 6, count).sum((0, 1))
    return ((total - 6 * (2**32 - 1)) * 2.0**-32).reshape(shape)


def heavy_tailed(seed: int, shape: tuple[int, ...]) -> np.ndarray:
    """Float64 close to Student's t with 3 degrees of freedom."""
    z, a, b, c = bell(seed, (4, *shape))
    return z / np.sqrt((a * a + b * b + c * c) / 3)


DISTRIBUTIONS = {"normal": bell, "heavy": heavy_tailed}
# Shape of the matrices that are quantized in many ways.
SMALL = (64, 256)
# Tensor amaxes of the matrices of ties.
TIE_AMAXES = (1.37, 3e-5, 812.3)
# Powers of two that the ladder matrices are multiplied by.
LADDER_EXPONENTS = (0, -80, 120)


def matrix(distribution: str, dtype: str, shape=(256, 1024), seed=20) -> np.ndarray:
    """A float32 matrix, its values rounded to bfloat16 where `dtype` says so."""
    x = DISTRIBUTIONS[distribution](seed, shape).astype(np.float32)
    return x if dtype == "float32" else x.astype(ml_dtypes.bfloat16).astype(np.float32)


def checksum(x: np.ndarray) -> str:
    """SHA-256 of an array's little-endian bytes."""
    little = np.ascontiguousarray(x).astype(x.dtype.newbyteorder("<"))
    return hashlib.sha256(little.tobytes()).hexdigest()


def ladder(tile: tuple[int, int], shape=(64, 256), seed=21) -> np.ndarray:
    """A float32 matrix whose tiles have amaxes from 1 down to 2^-40, some of them zero.

    It also holds negative zeros and the subnormal 1e-40.
    """
    rows, columns = (n // t for n, t in zip(shape, tile, strict=True))
    words = np.random.PCG64(seed).random_raw(rows * columns + 2 * shape[0])
    steps = (words[: rows * columns] % np.uint64(82)).astype(np.int64)
    amplitude = np.where(steps > 80, 0.0, np.ldexp(1.0, -(steps // 2)))
    amplitude = np.kron(amplitude.reshape(rows, columns), np.ones(tile))
    x = (bell(seed, shape) * amplitude).astype(np.float32)
    at = (words[rows * columns :] % np.uint64(shape[1])).astype(np.int64)
    x[np.arange(shape[0]), at[: shape[0]]] = -0.0
    x[np.arange(shape[0]), at[shape[0] :]] = 1e-40
    return x


def ties(amax: float, shape=(64, 256), seed=24) -> np.ndarray:
    """A float32 matrix whose 1x16 blocks have scales close to a tie of E4M3.

    Element 0 of a block is its amax: within 4 units in the last place of what the
    midpoint of two scale codes stands for, in a tensor of the given amax.
    """
    codes = np.arange(0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn)
    midpoints = (codes[1:].astype(np.float64) + codes[:-1].astype(np.float64)) / 2
    amaxes = (midpoints * np.float32(amax) / 448).astype(np.float32).view(np.int32)
    amaxes = np.add.outer(amaxes, np.arange(-4, 4)).astype(np.int32).view(np.float32)
    x = np.clip(bell(seed, (shape[0] * shape[1] // 16, 16)) / 5, -1, 1)
    x *= amax
    x[:, 0] = amax
    x = x.astype(np.float32)
    x[: amaxes.size] *= amaxes.reshape(-1, 1) / np.float32(amax)
    x[: amaxes.size, 0] = amaxes.ravel()
    return x.reshape(shape)


def lattice(shape=(128, 512), seed=22) -> np.ndarray:
    """A float32 matrix of multiples of 1/64 below 4: sums of 16 are exact."""
    return (np.clip(np.rint(bell(seed, shape) * 64), -255, 255) / 64).astype(np.float32)


def crowded(tile=16, shape=(64, 256), seed=25) -> np.ndarray:
    """A float32 matrix of multiples of 1/32 in square tiles, up to 1 in magnitude.

    A tile's values fill the upper part of its range, from 0.1 to 0.9 of it.
    """
    words = np.random.PCG64(seed).random_raw(int(np.prod(shape)))
    uniform = (words >> np.uint64(11)).astype(np.float64).reshape(shape) * 2.0**-53
    spread = 0.1 + 0.8 * uniform[::tile, ::tile]
    x = 1 - np.kron(spread, np.ones((tile, tile))) * uniform
    sign = np.where((words & np.uint64(1)).reshape(shape), 1, -1)
    return (np.rint(x * 32) / 32 * sign).astype(np.float32)


def save(name: str, **arrays: np.ndarray) -> None:
    """Writes one golden file, smaller than 500 kB."""
    path = HERE / f"{name}.npz"
    np.savez_compressed(path, **arrays)
    size = path.stat().st_size
    if size > 500_000:
        raise ValueError(f"save: {name} must stay below 500 kB, got {size} bytes.")
    print(f"{path.name}: {size} bytes")


def load(name: str) -> dict[str, np.ndarray]:
    """Reads one golden file."""
    with np.load(HERE / f"{name}.npz") as file:
        return dict(file)
