"""The stream of random bits, and codes that were rounded with it.

    python tests/golden/make_random_bits.py

The file that is kept was made with mmh3 5.3.1 and numpy 2.4.6; JAX takes no part.
Threefry-2x32 turns a key and the number of a stream into two words, those of
jax.random.fold_in(key, stream); MurmurHash3_x86_32 turns the words and a position into
16 bits.
"""

import inputs
import mmh3
import numpy as np

STREAMS = (0, 1, 2, 3, 4, 5, 8, 9, 10)
KEYS = ((0, 0), (0, 1), (0, 1234), (0x9E3779B9, 0x7F4A7C15), (2**32 - 1, 2**32 - 1))
ROWS = (*range(8), 511, 512, 65535, 65536, 2**20 + 1, 2**31, 2**32 - 2, 2**32 - 1)
COLUMNS = (*range(32), 1023, 1024, 65535, 65536, 2**24 + 1, 2**31, 2**32 - 2, 2**32 - 1)


def threefry2x32(key: tuple[int, int], count: tuple[int, int]) -> tuple[int, int]:
    """Salmon et al. 2011: 20 rounds."""
    rotations = (13, 15, 26, 6), (17, 29, 16, 24)
    schedule = (*key, key[0] ^ key[1] ^ 0x1BD11BDA)
    x = (count[0] + key[0]) % 2**32
    y = (count[1] + key[1]) % 2**32
    for i in range(5):
        for r in rotations[i % 2]:
            x = (x + y) % 2**32
            y = x ^ ((y << r | y >> (32 - r)) % 2**32)
        x = (x + schedule[(i + 1) % 3]) % 2**32
        y = (y + schedule[(i + 2) % 3] + i + 1) % 2**32
    return x, y


def key_words(key: tuple[int, int], stream: int) -> tuple[int, int]:
    """The two words of the key folded with a stream."""
    return threefry2x32(key, (0, stream))


def uniform16(words: tuple[int, int], row: int, column: int) -> int:
    """16 bits of the hash of (k0, k1, row, column // 2)."""
    message = np.array([*words, row, column // 2], "<u4").tobytes()
    h = mmh3.hash(message, 0, signed=False)
    return h >> 16 if column % 2 else h & 0xFFFF


def bits(words: tuple[int, int], rows, columns) -> np.ndarray:
    """uint16 [rows, columns]."""
    return np.array([[uniform16(words, r, c) for c in columns] for r in rows], "u2")


def rounded(x: np.ndarray, u: np.ndarray, magnitudes: np.ndarray) -> np.ndarray:
    """Sign-magnitude codes: the upper neighbour with the probability of 16 bits."""
    t = np.minimum(np.abs(x.astype(np.float64)), magnitudes[-1])
    below = np.searchsorted(magnitudes, t, side="right") - 1
    below = np.minimum(below, len(magnitudes) - 2)
    a, b = magnitudes[below], magnitudes[below + 1]
    i = np.floor((t - a) / (b - a) * 2**16).astype(np.int64)
    code = below + ((i + u) >> 16)
    return np.where((x < 0) & (code > 0), code + len(magnitudes), code).astype(np.uint8)


def main() -> None:
    """Writes random_bits.npz."""
    words = np.array([[key_words(k, s) for s in STREAMS] for k in KEYS], np.uint32)
    all_words = words.reshape(-1, 2).tolist()
    # Blocks with an amax of g_max have scale 1, so that x itself is rounded.
    x = np.clip(inputs.bell(23, (24, 48)) * 2, -6, 6).astype(np.float32)
    x[np.add.outer(np.arange(24), np.arange(48)) % 4 == 0] = 6.0
    stream, key = 2, KEYS[2]
    u = bits(key_words(key, stream), range(24), range(48))
    u_transposed = bits(key_words(key, stream), range(48), range(24)).T
    e2m1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    inputs.save(
        "random_bits",
        keys=np.array(KEYS, np.uint32),
        streams=np.array(STREAMS),
        words=words,
        rows=np.array(ROWS, np.uint32),
        columns=np.array(COLUMNS, np.uint32),
        bits=np.stack([bits(w, ROWS, COLUMNS) for w in all_words]),
        x=x,
        x_key=np.array(key, np.uint32),
        x_stream=np.array(stream),
        codes_axis1=rounded(x, u, e2m1),
        codes_axis0=rounded(x, u_transposed, e2m1),
    )


if __name__ == "__main__":
    main()
