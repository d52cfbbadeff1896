"""From text to a tokenized folder, document by document.

Passes over the source: one that splits it, one that draws what BPE learns from, and one
that encodes. Memory holds 10 bytes a document, and about 160 while they are split; the
characters that BPE learns from (4096 for each token), a few million characters of text,
and a shard of each split.
"""

import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from fp4jax.data import shards, tokenizers
from fp4jax.data.config import TOKENIZERS, DataConfig
from fp4jax.data.mixture import DomainSource, domain_sources
from fp4jax.data.sources import Document
from fp4jax.data.splits import Survey, survey
from fp4jax.data.tokenizers import Tokenizer

Progress = Callable[[str, int, int | None], None]  # (what, documents done, of how many)

_BATCH_CHARS = 2**22  # encoded at once
_SPLITS = ("train", "heldout")


def quiet(what: str, done: int, total: int | None) -> None:
    """Shows no progress."""


def survey_domains(
    config: DataConfig, *, progress: Progress = quiet
) -> dict[DomainSource, Survey]:
    """Splits the documents of every domain.

    Raises:
      ValueError: a source that cannot be read, or has fewer than two documents.
    """
    return {
        domain: survey(
            _shown(domain.documents(), progress, f"reading {domain.name}", None),
            holdout=config.holdout,
            source=domain.source,
        )
        for domain in domain_sources(config)
    }


def write_tokens(
    config: DataConfig,
    surveys: dict[DomainSource, Survey],
    folder: Path,
    *,
    progress: Progress = quiet,
    shard_tokens: int = shards.SHARD_TOKENS,
) -> None:
    """Writes the tokens of all domains, the tokenizer and last the index to `folder`.

    Raises:
      ValueError: a tokenizer.json that cannot be used, or a source that has changed
        since it was surveyed.
    """
    json = _tokenizer_json(config, surveys, progress)
    tokenizer = tokenizers.load_tokenizer(json, vocab_size=config.vocab_size)
    if json:
        (folder / shards.TOKENIZER).write_text(json, encoding="utf-8")
    domains = []
    for domain, found in surveys.items():
        writers = {
            split: shards.ShardWriter(
                folder,
                f"{domain.name}/{split}",
                vocab_size=config.vocab_size,
                size=shard_tokens,
            )
            for split in _SPLITS
        }
        documents = _again(domain, found, progress, f"encoding {domain.name}")
        sizes = _encode(documents, found, tokenizer, writers)
        splits = {s: {"bytes": sizes[s], **writers[s].finish()} for s in _SPLITS}
        domains.append({"name": domain.name, "weight": domain.weight, **splits})
    shards.write_index(
        folder,
        {
            "source": config.source,
            "tokenizer": shards.TOKENIZER if json else "bytes",
            "tokenizer_sha256": shards.sha256(json.encode()),
            "vocab_size": config.vocab_size,
            "holdout": config.holdout,
            "domains": domains,
        },
    )


def write_whole(folder: Path, write: Callable[[Path], None]) -> None:
    """Calls `write` with an empty folder that then becomes `folder`, whole or not."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{folder.name}."
    with tempfile.TemporaryDirectory(prefix=prefix, dir=folder.parent) as scratch:
        partial = Path(scratch, folder.name)
        partial.mkdir()
        write(partial)
        partial.replace(folder)


def read_tokenizer(config: DataConfig) -> tuple[str, int] | None:
    """Returns JSON and least vocab_size of a tokenizer.json; None if none is named."""
    if config.tokenizer in TOKENIZERS:
        return None
    return tokenizers.read_tokenizer(Path(config.tokenizer))


def _tokenizer_json(
    config: DataConfig, surveys: dict[DomainSource, Survey], progress: Progress
) -> str:
    """Returns the JSON of the tokenizer, trained if need be; "" for bytes."""
    if config.tokenizer == "bytes":
        return ""
    if (given := read_tokenizer(config)) is not None:
        return given[0]
    weights = sum(domain.weight for domain in surveys)
    size = tokenizers.sample_size(config.vocab_size)
    pieces = [
        piece
        for domain, found in surveys.items()
        for piece in _sample(domain, found, size * domain.weight / weights, progress)
    ]
    progress("learning tokens", 0, None)
    return tokenizers.train_tokenizer(pieces, vocab_size=config.vocab_size)


def _sample(
    domain: DomainSource, found: Survey, size: float, progress: Progress
) -> list[str]:
    """Returns the pieces of the training documents that BPE learns from."""
    trained = np.flatnonzero(found.train)
    texts, starts = tokenizers.sample_places(found.lengths[trained], size)
    places: dict[int, list[int]] = {}
    for rank, document in enumerate(trained[texts].tolist()):
        places.setdefault(document, []).append(rank)
    pieces = [""] * len(texts)
    documents = _again(domain, found, progress, f"sampling {domain.name}")
    for position, document in enumerate(documents):
        for rank in places.get(position, ()):
            pieces[rank] = tokenizers.piece(document.text, int(starts[rank]))
    return pieces


def _encode(
    documents: Iterable[Document],
    found: Survey,
    tokenizer: Tokenizer,
    writers: dict[str, shards.ShardWriter],
) -> dict[str, int]:
    """Writes every document to its split; returns the bytes of text in each."""
    sizes = dict.fromkeys(_SPLITS, 0)
    placed = (
        ("train" if train else "heldout", document.text)
        for train, heldout, document in zip(
            found.train, found.heldout, documents, strict=True
        )
        if train or heldout
    )
    for batch in _by_size(placed):
        texts = [text for _, text in batch]
        for (side, text), tokens in zip(batch, tokenizer.encode(texts), strict=True):
            writers[side].append(np.append(tokens, tokenizer.endoftext))
            sizes[side] += len(text.encode())
    return sizes


def _by_size(placed: Iterable[tuple[str, str]]) -> Iterator[Sequence[tuple[str, str]]]:
    """Groups (side, text) to about equal numbers of characters."""
    batch, size = [], 0
    for side, text in placed:
        batch.append((side, text))
        size += len(text)
        if size >= _BATCH_CHARS:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _again(
    domain: DomainSource, found: Survey, progress: Progress, what: str
) -> Iterator[Document]:
    """Yields the documents that were surveyed, or raises."""
    total, position = len(found.lengths), -1
    documents = _shown(domain.documents(), progress, what, total)
    for position, document in enumerate(documents):
        if position >= total or len(document.text) != found.lengths[position]:
            break
        yield document
    else:
        if position == total - 1:
            return
    raise ValueError(
        f"tokenize: source must stay as it is while it is read, got {domain.source!r} "
        f"changed at document {position} of {total}. Start again."
    )


def _shown(
    documents: Iterable[Document], progress: Progress, what: str, total: Any
) -> Iterator[Document]:
    for position, document in enumerate(documents):
        progress(what, position, total)
        yield document
