"""Text of which nothing is trained on: all of its documents are held out."""

import hashlib
from pathlib import Path

import numpy as np

from fp4jax.data.config import DataConfig
from fp4jax.data.corpus import Corpus, Documents, Domain, is_tokenized, open_corpus
from fp4jax.data.mixture import DomainSource, domain_sources
from fp4jax.data.tokenizers import Tokenizer

_NONE = Documents(np.zeros(0, np.uint32), np.zeros(0, np.int64))


def read_heldout(config: DataConfig, tokenizer: Tokenizer) -> Corpus:
    """Returns a corpus to evaluate on, encoded by the tokenizer of a run.

    Every document of a text is held out, and all of its tokens are in memory. Of a
    folder of `experiments.tokenize` these are its held-out documents.

    Args:
      config: source, text_field and site_packages say what to read.
      tokenizer: of the run's corpus.

    Raises:
      ValueError: text that cannot be read, a domain without a token to predict, or
        tokens of another tokenizer.
      ImportError: the library that reads the source is not installed.
    """
    if not is_tokenized(config.source):
        domains = tuple(_domain(each, tokenizer) for each in domain_sources(config))
        return Corpus(domains, tokenizer, _fingerprint(domains))
    corpus = open_corpus(Path(config.source))
    kinds = [(t.to_json(), len(t.token_bytes)) for t in (corpus.tokenizer, tokenizer)]
    if kinds[0] != kinds[1]:
        raise ValueError(
            "read_heldout: source must be text, or tokens of the run's tokenizer, got "
            f"{config.source!r}, tokens of another. Pass the text that it was made of."
        )
    return corpus


def _domain(source: DomainSource, tokenizer: Tokenizer) -> Domain:
    found = [
        np.append(tokens, tokenizer.endoftext).astype(np.uint32)
        for document in source.documents()
        for tokens in tokenizer.encode([document.text])
    ]
    ends = np.cumsum([len(tokens) for tokens in found], dtype=np.int64)
    if not found:
        raise ValueError(
            f"read_heldout: source must hold text, got none in {source.source!r}."
        )
    documents = Documents(np.concatenate(found), ends)
    return Domain(source.name, source.weight, _NONE, documents)


def _fingerprint(domains: tuple[Domain, ...]) -> str:
    found = hashlib.sha256()
    for domain in domains:
        found.update(f"{domain.name}:{len(domain.heldout)}:".encode())
        found.update(np.asarray(domain.heldout.tokens).tobytes())
    return found.hexdigest()
