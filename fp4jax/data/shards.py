"""Tokenized text on disk: shards of tokens that are mapped, not read, and their index.

A folder holds `index.json`, `tokenizer.json` unless tokens are bytes, and for each
domain and split `DOMAIN/SPLIT-00000.tokens.npy`, whole documents end to end, each
closed by <|endoftext|>, with `DOMAIN/SPLIT-00000.ends.npy`, where each stops.
"""

import hashlib
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fp4jax.data.cache import Known

INDEX = "index.json"
FORMAT = 1
TOKENIZER = "tokenizer.json"
SHARD_TOKENS = 2**26  # 128 MB of uint16, the memory that writing takes


class ShardWriter:
    """Writes the documents of one split; `finish` returns their part of the index."""

    def __init__(
        self, folder: Path, prefix: str, *, vocab_size: int, size: int = SHARD_TOKENS
    ):
        self._folder, self._prefix, self._size = folder, prefix, size
        self._dtype = _token_dtype(vocab_size)
        self._shards: list[dict[str, Any]] = []
        self._documents: list[NDArray[np.unsignedinteger]] = []
        self._count = 0

    def append(self, document: NDArray[np.integer]) -> None:
        """Adds the tokens of one document, which end in <|endoftext|>."""
        if self._count and self._count + len(document) > self._size:
            self._write()
        self._documents.append(document.astype(self._dtype))
        self._count += len(document)

    def finish(self) -> dict[str, Any]:
        """Writes what is left."""
        if self._count:
            self._write()
        return {
            "tokens": sum(shard["tokens"] for shard in self._shards),
            "documents": sum(shard["documents"] for shard in self._shards),
            "shards": self._shards,
        }

    def _write(self) -> None:
        stem = f"{self._prefix}-{len(self._shards):05}"
        tokens = np.concatenate(self._documents)
        ends = np.cumsum([len(document) for document in self._documents], dtype="<i8")
        path = self._folder / f"{stem}.tokens.npy"
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, tokens)
        np.save(self._folder / f"{stem}.ends.npy", ends)
        self._shards.append(
            {
                "name": stem,
                "tokens": len(tokens),
                "documents": len(ends),
                "sha256": sha256(tokens.tobytes()),
            }
        )
        self._documents, self._count = [], 0


class ShardedTokens:
    """The tokens of several shards as one array, mapped into memory.

    Args:
      paths: of the shards' tokens.
      sizes: tokens in each.
      vocab_size: more than any token.

    Raises:
      ValueError: a shard that cannot be mapped or has another size; on access, a token
        beyond the vocabulary.
    """

    def __init__(self, paths: Sequence[Path], sizes: Sequence[int], *, vocab_size: int):
        self._paths, self._sizes = tuple(paths), tuple(sizes)
        self._vocab_size = vocab_size
        self._stops = np.cumsum(self._sizes)
        dtype = _token_dtype(vocab_size)
        self._shards = [
            _map(path, size, dtype) for path, size in zip(paths, sizes, strict=True)
        ]

    def __reduce__(self):  # a worker maps the files itself
        return _sharded, (self._paths, self._sizes, self._vocab_size)

    def __len__(self) -> int:
        return int(self._stops[-1])

    def __getitem__(
        self, index: slice | NDArray[np.integer]
    ) -> NDArray[np.unsignedinteger]:
        """Returns the tokens at a slice, or at an array of positions of any shape."""
        if isinstance(index, slice):
            index = np.arange(*index.indices(len(self)))
        tokens = np.empty(index.shape, self._shards[0].dtype)
        if not tokens.size:
            return tokens
        shard_of = np.searchsorted(self._stops, index, side="right")
        for shard in np.unique(shard_of):
            inside = ... if shard_of.min() == shard_of.max() else shard_of == shard
            start = self._stops[shard] - self._sizes[shard]
            tokens[inside] = self._shards[shard][index[inside] - start]
        if tokens.max() >= self._vocab_size:
            self._raise_beyond(index[tokens >= self._vocab_size].min())
        return tokens

    def _raise_beyond(self, position: int) -> None:
        shard = int(np.searchsorted(self._stops, position, side="right"))
        inside = int(position - self._stops[shard] + self._sizes[shard])
        raise ValueError(
            f"tokens: every token must be below vocab_size={self._vocab_size}, got "
            f"{self._shards[shard][inside]} at position {inside} of "
            f"{str(self._paths[shard])!r}. Make the folder again."
        )


def _sharded(paths: tuple, sizes: tuple, vocab_size: int) -> ShardedTokens:
    return ShardedTokens(paths, sizes, vocab_size=vocab_size)


def open_split(
    folder: Path, split: dict[str, Any], *, vocab_size: int
) -> tuple[ShardedTokens, NDArray[np.int64]]:
    """Returns the tokens and the ends of the documents of one split of the index.

    Raises:
      ValueError: a shard is missing, unreadable, truncated, or not the one that the
        index has hashed.
    """
    shards = split["shards"]
    names = [folder / shard["name"] for shard in shards]
    paths = [name.with_name(name.name + ".tokens.npy") for name in names]
    tokens = ShardedTokens(
        paths, [shard["tokens"] for shard in shards], vocab_size=vocab_size
    )
    ends, start = [], 0
    for name, tokens_path, shard in zip(names, paths, shards, strict=True):
        path = name.with_name(name.name + ".ends.npy")
        found = np.asarray(_map(path, shard["documents"], np.dtype("<i8")))
        if found[-1] != shard["tokens"] or np.any(np.diff(found, prepend=0) < 1):
            raise _damaged(path, "ends that rise to the shard's size", "others")
        _check_contents(tokens_path, path, shard, found)
        ends.append(found + start)
        start += shard["tokens"]
    return tokens, np.concatenate(ends)


def read_index(folder: Path) -> dict[str, Any]:
    """Returns the index of a tokenized folder.

    Raises:
      ValueError: no index, or one that this version does not know.
    """
    path = folder / INDEX
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
        found = index["format"]
        if found == FORMAT:
            _check_fields(index)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _damaged(path, "a readable index", f"{error!r}") from error
    if found != FORMAT:
        raise _damaged(path, f"format {FORMAT}", f"format {found}")
    return index


def _check_fields(index: dict[str, Any]) -> None:
    """Raises ValueError, KeyError or TypeError unless each field is of its kind."""
    tokenizer, domains = index["tokenizer"], index["domains"]
    checksum = "" if tokenizer == "bytes" else index["tokenizer_sha256"]
    vocab_size, names = index["vocab_size"], [domain["name"] for domain in domains]
    shards = [s for d in domains for k in ("train", "heldout") for s in d[k]["shards"]]
    named = (s[field] for s in shards for field in ("name", "sha256"))
    texts = (tokenizer, checksum, *names, *named)
    for field, holds in (
        ("vocab_size", isinstance(vocab_size, int) and vocab_size > 0),
        ("holdout", 0 < index["holdout"] < 1),
        ("domains", bool(names) and len(set(names)) == len(names)),
        ("weight", all(0 < domain["weight"] < math.inf for domain in domains)),
        ("text", all(isinstance(text, str) for text in texts)),
        ("shards", all(d[k]["shards"] for d in domains for k in ("train", "heldout"))),
        ("size", all(s["tokens"] >= s["documents"] > 0 for s in shards)),
    ):
        if not holds:
            raise ValueError(f"another {field}")


def read_tokenizer(folder: Path, index: dict[str, Any]) -> str:
    """Returns the JSON of the folder's tokenizer.

    Raises:
      ValueError: it is missing, or not the one that made the tokens.
    """
    path = folder / TOKENIZER
    try:
        data = path.read_bytes()
    except OSError as error:
        raise _damaged(path, "a readable tokenizer", f"{error}") from error
    if (found := sha256(data)) != index["tokenizer_sha256"]:
        raise _damaged(path, f"of SHA-256 {index['tokenizer_sha256']}", found)
    return data.decode()


def write_index(folder: Path, index: dict[str, Any]) -> None:
    """Writes the index, which makes the folder a tokenized one."""
    text = json.dumps({"format": FORMAT, **index}, indent=1)
    (folder / INDEX).write_text(text + "\n", encoding="utf-8")


def fingerprint(index: dict[str, Any]) -> str:
    """Returns the hash of everything that decides a batch, but not of its source."""
    decisive = {name: value for name, value in index.items() if name != "source"}
    return sha256(json.dumps(decisive, sort_keys=True).encode())


def sha256(data: bytes) -> str:
    """Returns the hash as text."""
    return hashlib.sha256(data).hexdigest()


def _token_dtype(vocab_size: int) -> np.dtype:
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def _check_contents(
    tokens_path: Path, ends_path: Path, shard: dict[str, Any], ends: NDArray[np.int64]
) -> None:
    """Raises ValueError unless a shard has its hash and its ends close documents."""
    known = Known((tokens_path, ends_path), shard["sha256"])
    if known:
        return
    tokens = np.load(tokens_path, mmap_mode="r")
    if (found := hashlib.sha256(tokens).hexdigest()) != shard["sha256"]:
        raise _damaged(tokens_path, f"of SHA-256 {shard['sha256']}", found)
    if np.any(tokens[ends - 1] != tokens[-1]):
        raise _damaged(ends_path, "ends at <|endoftext|>", "others")
    known.remember()


def _map(path: Path, size: int, dtype: np.dtype) -> NDArray:
    """Maps a vector of `size` numbers."""
    try:
        array = np.load(path, mmap_mode="r")
    except (OSError, ValueError, EOFError) as error:
        raise _damaged(path, "a readable, whole shard", f"{error}") from error
    if array.shape != (size,) or array.dtype != dtype:
        expected = f"{size} numbers of {dtype}, as {INDEX} has it"
        raise _damaged(path, expected, f"{array.shape} of {array.dtype}")
    return array


def _damaged(path: Path, expected: str, found: str) -> ValueError:
    return ValueError(
        f"tokens: {str(path)!r} must be {expected}, got {found}. Make the folder again "
        "or copy it anew."
    )
