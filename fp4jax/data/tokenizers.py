"""Two tokenizers: raw bytes, and byte-level BPE trained on the corpus itself.

Both cover every text without an unknown token. The last id, `vocab_size - 1`, is
<|endoftext|>; it is no text, so a document that spells it out is encoded as any other.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders, models, pre_tokenizers, trainers

MIN_VOCAB_SIZE = 257  # 256 bytes and <|endoftext|>
_TRAIN_CHARS = 1 << 12  # for each token to learn; half a second for 512 tokens
_SAMPLE_CHARS = 1 << 14  # training pieces: many places, so that no long text dominates
_PIECE_CHARS = 1 << 18  # longest text encoded at once: bounds memory
_BATCH_SIZE = 32  # texts encoded in parallel


class Tokenizer(Protocol):
    """What a corpus needs: `token_bytes[i]` is the number of bytes token i spells."""

    token_bytes: NDArray[np.int32]

    def encode(self, texts: Sequence[str]) -> Iterator[NDArray[np.integer]]:
        """Yields the tokens of each text, without <|endoftext|>."""
        ...

    def decode(self, tokens: Iterable[int]) -> str:
        """Returns the text of the tokens, <|endoftext|> left out."""
        ...

    def to_json(self) -> str:
        """Returns all that is needed to make this tokenizer again."""
        ...


class ByteTokenizer:
    """Token i is byte i; ids between 255 and <|endoftext|> stay unused."""

    def __init__(self, vocab_size: int):
        self.token_bytes = (np.arange(vocab_size) < 256).astype(np.int32)

    def encode(self, texts: Sequence[str]) -> Iterator[NDArray[np.integer]]:
        """See `Tokenizer`."""
        return (np.frombuffer(text.encode(), np.uint8) for text in texts)

    def decode(self, tokens: Iterable[int]) -> str:
        """See `Tokenizer`."""
        return bytes(t for t in tokens if t < 256).decode(errors="replace")

    def to_json(self) -> str:
        """See `Tokenizer`."""
        return ""


class BPETokenizer:
    """Byte-level BPE with GPT-2's word pattern, as its own JSON describes it."""

    def __init__(self, json: str, vocab_size: int):
        self._bpe = tokenizers.Tokenizer.from_str(json)
        self.token_bytes = np.zeros(vocab_size, np.int32)
        for token, index in self._bpe.get_vocab().items():
            self.token_bytes[index] = len(token)  # one character stands for a byte

    def encode(self, texts: Sequence[str]) -> Iterator[NDArray[np.integer]]:
        """See `Tokenizer`; a text beyond 2**18 characters is encoded in pieces."""
        pieces = [_pieces(text) for text in texts]
        encoded = self._encode([piece for text in pieces for piece in text])
        for text in pieces:
            yield np.concatenate([next(encoded) for _ in text])

    def _encode(self, texts: list[str]) -> Iterator[NDArray[np.integer]]:
        for start in range(0, len(texts), _BATCH_SIZE):
            batch = texts[start : start + _BATCH_SIZE]
            for encoding in self._bpe.encode_batch_fast(batch):
                yield np.array(encoding.ids, np.int32)

    def decode(self, tokens: Iterable[int]) -> str:
        """See `Tokenizer`."""
        return self._bpe.decode([*tokens])

    def to_json(self) -> str:
        """See `Tokenizer`."""
        return self._bpe.to_str()


def train_tokenizer(kind: str, texts: Sequence[str], *, vocab_size: int) -> Tokenizer:
    """Makes the tokenizer `kind`, "bytes" or "bpe".

    "bpe" learns its merges from 4096 characters for each token, drawn from all texts.
    Texts too few for `vocab_size` tokens leave the ids before the last unused.
    """
    if kind == "bytes":
        return ByteTokenizer(vocab_size)
    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(_sample(texts, _TRAIN_CHARS * vocab_size), trainer)
    return BPETokenizer(bpe.to_str(), vocab_size)


def load_tokenizer(kind: str, json: str, *, vocab_size: int) -> Tokenizer:
    """Makes again the tokenizer whose `to_json` gave `json`."""
    if kind == "bytes":
        return ByteTokenizer(vocab_size)
    return BPETokenizer(json, vocab_size)


def _pieces(text: str) -> list[str]:
    starts = range(0, max(len(text), 1), _PIECE_CHARS)
    return [text[start : start + _PIECE_CHARS] for start in starts]


def _sample(texts: Sequence[str], size: int) -> Iterator[str]:
    """Draws pieces of the texts, without repetition, to about `size` characters."""
    places = [(t, i) for t in texts for i in range(0, len(t), _SAMPLE_CHARS)]
    for index in np.random.default_rng(0).permutation(len(places)):
        text, start = places[index]
        piece = text[start : start + _SAMPLE_CHARS]
        yield piece
        size -= len(piece)
        if size <= 0:
            return
