"""The corpus: tokenized documents in two splits, kept in the user's cache folder."""

import hashlib
import logging
import os
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from fp4jax.data.sources import Document, read_documents, split_documents
from fp4jax.data.tokenizers import (
    MIN_VOCAB_SIZE,
    Tokenizer,
    load_tokenizer,
    train_tokenizer,
)

_CACHE_FORMAT = 1  # raise it whenever equal inputs would give other arrays
_TOKENIZERS = ("bpe", "bytes")
MAX_VOCAB_SIZE = 2**20

Arrays = dict[str, Any]  # a tokenized corpus as it lies in the cache


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What to read, how to tokenize it, and how to cut it into batches.

    Attributes:
      source: "stdlib", a folder of `*.txt`, or one text file.
      site_packages: with "stdlib", reads the installed packages' sources too.
      tokenizer: "bpe" (byte level, trained on the corpus) or "bytes".
      vocab_size: number of ids, <|endoftext|> included; what the model must embed.
      sequence_length: tokens a row.
      batch_size: rows a batch.
      holdout: part of the documents that is never trained on.
      seed: of the order in which rows are drawn.

    Raises:
      ValueError: a value outside its range.
    """

    source: str = "stdlib"
    site_packages: bool = False
    tokenizer: str = "bpe"
    vocab_size: int = 512
    sequence_length: int = 256
    batch_size: int = 8
    holdout: float = 0.02
    seed: int = 0

    def __post_init__(self):
        for name, holds, allowed in (
            ("source", bool(self.source), "'stdlib', a folder or a file"),
            (
                "site_packages",
                self.source == "stdlib" or not self.site_packages,
                f'False unless source="stdlib", as source={self.source!r}',
            ),
            (
                "tokenizer",
                self.tokenizer in _TOKENIZERS,
                f"one of {', '.join(_TOKENIZERS)}",
            ),
            (
                "vocab_size",
                MIN_VOCAB_SIZE <= self.vocab_size <= MAX_VOCAB_SIZE,
                f"at least {MIN_VOCAB_SIZE}, the 256 bytes and <|endoftext|>, and at "
                f"most {MAX_VOCAB_SIZE}",
            ),
            ("sequence_length", self.sequence_length >= 1, "at least 1"),
            ("batch_size", self.batch_size >= 1, "at least 1"),
            ("holdout", 0 < self.holdout < 1, "above 0 and below 1"),
            ("seed", 0 <= self.seed < 2**32, "from 0 to 2**32 - 1"),
        ):
            if not holds:
                raise ValueError(
                    f"DataConfig: {name} must be {allowed}, "
                    f"got {name}={getattr(self, name)!r}."
                )


@dataclass(frozen=True, eq=False)
class Documents:
    """Tokenized documents, end to end, each closed by <|endoftext|>.

    Attributes:
      names: where each document came from.
      tokens: [n] uint16 or uint32, all documents.
      ends: [len(names)] int64, where each document stops in `tokens`.
    """

    names: tuple[str, ...]
    tokens: NDArray[np.unsignedinteger]
    ends: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> NDArray[np.unsignedinteger]:
        start = self.ends[index - 1] if index else 0
        return self.tokens[start : self.ends[index]]

    @property
    def num_targets(self) -> int:
        """Number of next tokens to predict: all but the first of each document."""
        return len(self.tokens) - len(self.ends)


@dataclass(frozen=True, eq=False)
class Corpus:
    """Two splits of one tokenized text."""

    train: Documents
    heldout: Documents
    tokenizer: Tokenizer

    @property
    def token_bytes(self) -> NDArray[np.int32]:
        """[vocab_size], the bytes that each token spells; 0 for <|endoftext|>."""
        return self.tokenizer.token_bytes


def load_corpus(config: DataConfig) -> Corpus:
    """Reads, splits and tokenizes the documents of `config.source`.

    Tokenizer and tokens are cached by the hash of the documents and of the settings
    they depend on, in `$FP4JAX_CACHE`, `$XDG_CACHE_HOME/fp4jax` or `~/.cache/fp4jax`.

    Raises:
      ValueError: nothing to read or to predict, one document only, or text that is
        not UTF-8.
    """
    documents = read_documents(config.source, site_packages=config.site_packages)
    train, heldout = split_documents(documents, config.holdout)
    arrays = _cached(
        _key(config, train=train, heldout=heldout),
        lambda: _tokenize(config, train=train, heldout=heldout),
    )

    def split(name: str, documents: list[Document]) -> Documents:
        names = tuple(document.name for document in documents)
        found = Documents(names, arrays[f"{name}_tokens"], arrays[f"{name}_ends"])
        if found.num_targets == len(names):  # <|endoftext|> alone
            raise ValueError(
                f"load_corpus: the {name} documents must hold text to predict after "
                f"their first token, got none in {len(names)} documents. Add text."
            )
        return found

    return Corpus(
        train=split("train", train),
        heldout=split("heldout", heldout),
        tokenizer=load_tokenizer(
            config.tokenizer, str(arrays["tokenizer"]), vocab_size=config.vocab_size
        ),
    )


def _tokenize(
    config: DataConfig, *, train: list[Document], heldout: list[Document]
) -> Arrays:
    """Trains the tokenizer and encodes both splits: the arrays that are cached."""
    tokenizer = train_tokenizer(
        config.tokenizer, [d.text for d in train], vocab_size=config.vocab_size
    )
    dtype = np.uint16 if config.vocab_size <= 1 << 16 else np.uint32
    endoftext = np.array([config.vocab_size - 1], dtype)
    arrays: Arrays = {"tokenizer": np.array(tokenizer.to_json())}
    for name, documents in (("train", train), ("heldout", heldout)):
        encoded = [
            np.append(tokens.astype(dtype), endoftext)
            for tokens in tokenizer.encode([document.text for document in documents])
        ]
        arrays[f"{name}_tokens"] = np.concatenate(encoded)
        arrays[f"{name}_ends"] = np.cumsum([len(tokens) for tokens in encoded])
    return arrays


def _key(config: DataConfig, *, train: list[Document], heldout: list[Document]) -> str:
    """Returns the hash of all that the cached arrays depend on."""
    settings = (_CACHE_FORMAT, tokenizers.__version__, config.tokenizer)
    key = hashlib.sha256(repr((*settings, config.vocab_size, len(train))).encode())
    for document in (*train, *heldout):
        key.update(document.digest)
    return key.hexdigest()


def _cached(key: str, make: Callable[[], Arrays]) -> Arrays:
    """Returns `make()`, or what an earlier call with the same key has kept."""
    xdg = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = Path(os.environ.get("FP4JAX_CACHE") or xdg / "fp4jax")
    path = folder / f"corpus-{key}.npz"
    if path.exists():
        try:
            with path.open("rb") as stream, np.load(stream) as file:
                return dict(file)
        except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
            logging.getLogger(__name__).warning("%s is made anew: %s.", path, error)
    arrays = make()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            partial = Path(scratch, path.name)
            np.savez(partial, **arrays)
            partial.replace(path)  # atomic: readers see the whole file or none
    except OSError as error:
        logging.getLogger(__name__).warning(
            "The corpus is not cached: %s. Set FP4JAX_CACHE to a folder with room.",
            error,
        )
    return arrays
