"""The corpus: domains of tokenized documents in two splits, mapped from disk."""

import hashlib
import logging
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers as huggingface
from numpy.typing import NDArray

from fp4jax.data import shards, tokenization
from fp4jax.data.cache import cache_folder
from fp4jax.data.config import DataConfig
from fp4jax.data.mixture import DomainSource
from fp4jax.data.shards import ShardedTokens
from fp4jax.data.splits import Survey
from fp4jax.data.tokenization import Progress, quiet
from fp4jax.data.tokenizers import Tokenizer, load_tokenizer

_CACHE_FORMAT = 2  # raise it whenever equal inputs would give other tokens
_uncached: list[tempfile.TemporaryDirectory] = []  # removed when the process ends


@dataclass(frozen=True, eq=False)
class Documents:
    """Tokenized documents, end to end, each closed by <|endoftext|>.

    Attributes:
      tokens: [n] uint16 or uint32, all documents.
      ends: [d] int64, where each document stops in `tokens`.
    """

    tokens: NDArray[np.unsignedinteger] | ShardedTokens
    ends: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> NDArray[np.unsignedinteger]:
        start = self.ends[index - 1] if index else 0
        return self.tokens[int(start) : int(self.ends[index])]

    @property
    def num_targets(self) -> int:
        """Number of next tokens to predict: all but the first of each document."""
        return len(self.tokens) - len(self.ends)


@dataclass(frozen=True, eq=False)
class Domain:
    """Two splits of one kind of text.

    Attributes:
      name: tells it from the others.
      weight: its share of the rows of training, relative to the others.
    """

    name: str
    weight: float
    train: Documents
    heldout: Documents


@dataclass(frozen=True, eq=False)
class Corpus:
    """All that there is to train on.

    Attributes:
      domains: at least one.
      tokenizer: what its tokens mean.
      fingerprint: equal for two corpora of the same tokens, splits and weights.
    """

    domains: tuple[Domain, ...]
    tokenizer: Tokenizer
    fingerprint: str

    @property
    def token_bytes(self) -> NDArray[np.int32]:
        """[vocab_size], the bytes that each token spells; 0 for <|endoftext|>."""
        return self.tokenizer.token_bytes

    @property
    def num_train_tokens(self) -> int:
        """Tokens of the training documents of all domains."""
        return sum(len(domain.train.tokens) for domain in self.domains)


def load_corpus(config: DataConfig) -> Corpus:
    """Maps the tokens of `config.source`, which are made first if it is text.

    Tokens made here are cached by the hash of the documents and of the settings they
    depend on, in `$FP4JAX_CACHE`, `$XDG_CACHE_HOME/fp4jax` or `~/.cache/fp4jax`. Every
    call reads the text once to find that hash; `experiments.tokenize` spares that.

    Args:
      config: says what to read, how to split and how to tokenize it.

    Raises:
      ValueError: nothing to read or to predict, one document only, text that is not
        UTF-8, damaged files, or settings that a tokenized folder decides otherwise.
      ImportError: the library that reads the source is not installed.
    """
    if is_tokenized(config.source):
        for name, value in decided_by_source(config).items():
            if (found := getattr(config, name)) != value:
                raise ValueError(
                    f"load_corpus: {name} must be {value!r}, as "
                    f"{config.source!r} was made with it, got {name}={found!r}. "
                    "Take what fp4jax.data.decided_by_source(config) returns."
                )
        return open_corpus(Path(config.source))
    surveys = tokenization.survey_domains(config)
    folder = cache_folder() / f"corpus-{_key(config, surveys)}"
    if folder.exists():
        try:
            return open_corpus(folder)
        except ValueError as error:
            _logger().warning("%s is made anew: %s", folder, error)
            shutil.rmtree(folder, ignore_errors=True)
    return open_corpus(_make(config, surveys, folder))


def write_corpus(
    config: DataConfig,
    folder: Path,
    *,
    progress: Progress = quiet,
    shard_tokens: int = shards.SHARD_TOKENS,
) -> dict[str, Any]:
    """Tokenizes `config.source` into a folder, whole or not at all.

    Args:
      config: says what to read, how to split and how to tokenize it.
      folder: must not exist, or be empty.
      progress: called as (what, documents done, of how many or None).
      shard_tokens: the most in one shard, unless a document alone has more.

    Returns:
      The index of the folder.

    Raises:
      ValueError: text that cannot be read, or that is tokenized already.
      OSError: the folder cannot be written.
    """
    if is_tokenized(config.source):
        raise ValueError(
            f"write_corpus: source must be text, got {config.source!r}, which is "
            "tokenized already. Train on it as it is."
        )
    surveys = tokenization.survey_domains(config, progress=progress)

    def write(partial: Path) -> None:
        tokenization.write_tokens(
            config, surveys, partial, progress=progress, shard_tokens=shard_tokens
        )
        open_corpus(partial)  # raises if there is nothing to predict

    tokenization.write_whole(folder, write)
    return shards.read_index(folder)


def open_corpus(folder: Path) -> Corpus:
    """Maps a tokenized folder, whose tokens must be those that its index has hashed.

    A large shard is read for that once, and again only after it was written or moved.

    Raises:
      ValueError: it is damaged, or a split holds nothing to predict.
    """
    index = shards.read_index(folder)
    vocab_size, json = index["vocab_size"], ""
    if index["tokenizer"] != "bytes":
        json = shards.read_tokenizer(folder, index)
    domains = tuple(
        Domain(
            domain["name"],
            domain["weight"],
            *(
                _open_split(folder, domain, split, vocab_size=vocab_size)
                for split in ("train", "heldout")
            ),
        )
        for domain in index["domains"]
    )
    tokenizer = load_tokenizer(json, vocab_size=vocab_size)
    return Corpus(domains, tokenizer, shards.fingerprint(index))


def is_tokenized(source: str) -> bool:
    """Tells whether `source` is a folder that `experiments.tokenize` made."""
    return Path(source, shards.INDEX).is_file()


def decided_by_source(config: DataConfig) -> dict[str, Any]:
    """Returns the fields that follow from the source or from its tokenizer.json.

    A tokenized folder decides tokenizer, vocab_size and holdout, and leaves text_field
    at "text". A tokenizer.json decides vocab_size, though a larger one, whose last ids
    stay unused, is allowed.

    Example:
      >>> decided_by_source(DataConfig(source="stdlib"))
      {}

    Raises:
      ValueError: a folder or a file that cannot be read.
    """
    if is_tokenized(config.source):
        folder = Path(config.source)
        index = shards.read_index(folder)
        kind = index["tokenizer"]
        return {
            "tokenizer": kind if kind == "bytes" else str(folder / kind),
            "vocab_size": index["vocab_size"],
            "holdout": index["holdout"],
            "text_field": "text",
        }
    given = tokenization.read_tokenizer(config)
    return {} if given is None else {"vocab_size": given[1]}


def _open_split(
    folder: Path, domain: dict[str, Any], split: str, *, vocab_size: int
) -> Documents:
    found = Documents(*shards.open_split(folder, domain[split], vocab_size=vocab_size))
    if found.num_targets == len(found):  # <|endoftext|> alone
        raise ValueError(
            f"load_corpus: the {split} documents of {domain['name']!r} must hold text "
            f"to predict after their first token, got none, documents={len(found)}. "
            "Add text."
        )
    return found


def _key(config: DataConfig, surveys: dict[DomainSource, Survey]) -> str:
    """Returns the hash of all that the cached tokens depend on."""
    settings = (_CACHE_FORMAT, shards.FORMAT, huggingface.__version__)
    tokenizer = tokenization.read_tokenizer(config) or config.tokenizer
    key = hashlib.sha256(repr((*settings, tokenizer, config.vocab_size)).encode())
    for domain, found in surveys.items():
        key.update(repr((domain.name, domain.weight)).encode() + found.digest)
    return key.hexdigest()


def _make(
    config: DataConfig, surveys: dict[DomainSource, Survey], folder: Path
) -> Path:
    """Tokenizes into the cache, or where that cannot be written, until the end."""
    write = lambda folder: tokenization.write_tokens(config, surveys, folder)
    try:
        tokenization.write_whole(folder, write)
        return folder
    except OSError as error:
        if folder.exists():  # another process was faster
            return folder
        _logger().warning(
            "The corpus is not cached: %s. Set FP4JAX_CACHE to a folder with room.",
            error,
        )
    scratch = tempfile.TemporaryDirectory(prefix="fp4jax-")
    _uncached.append(scratch)
    write(Path(scratch.name))
    return Path(scratch.name)


def _logger() -> logging.Logger:
    return logging.getLogger(__name__)
