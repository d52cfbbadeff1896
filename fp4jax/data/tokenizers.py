"""Tokenizers: raw bytes, byte-level BPE trained on the corpus, or a tokenizer.json.

All cover every text without an unknown token. <|endoftext|> is the last id,
`vocab_size - 1`, unless a tokenizer.json has one of its own; it is no text, so a
document that spells it out is encoded as any other.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import decoders, models, pre_tokenizers, trainers

MIN_VOCAB_SIZE = 257  # 256 bytes and <|endoftext|>
_TRAIN_CHARS = 1 << 12  # for each token to learn; half a second for 512 tokens
_SAMPLE_CHARS = 1 << 14  # training pieces: many places, so that no long text dominates
_PIECE_CHARS = 1 << 18  # longest text encoded at once: bounds memory
_BATCH_SIZE = 32  # texts encoded in parallel
_ENDS_OF_TEXT = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>")


class Tokenizer(Protocol):
    """What a corpus needs of a tokenizer.

    Attributes:
      token_bytes: [vocab_size], the number of bytes each token spells; 0 if special.
      endoftext: id that closes a document.
    """

    token_bytes: NDArray[np.int32]
    endoftext: int

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
        self.endoftext = vocab_size - 1

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
    """Byte-level BPE, as its own JSON describes it.

    Raises:
      ValueError: it is not byte level, or has more ids than `vocab_size`.
    """

    def __init__(self, json: str, vocab_size: int):
        self._bpe = tokenizers.Tokenizer.from_str(json)
        self._bpe.encode_special_tokens = True  # a text may spell <|endoftext|> out
        self._bpe.no_truncation()
        self._bpe.no_padding()
        least, endoftext, added = _describe(json, self._bpe)
        if vocab_size < least:
            raise ValueError(
                f"tokenizer: vocab_size must be at least {least}, as the tokenizer has "
                f"so many ids, got vocab_size={vocab_size}."
            )
        self.endoftext = vocab_size - 1 if endoftext is None else endoftext
        self.token_bytes = np.zeros(vocab_size, np.int32)
        for token, index in self._bpe.get_vocab().items():
            self.token_bytes[index] = len(token)  # one character stands for a byte
        for index, text in added.items():
            self.token_bytes[index] = len(text.encode())

    def encode(self, texts: Sequence[str]) -> Iterator[NDArray[np.integer]]:
        """See `Tokenizer`; a text beyond 2**18 characters is encoded in pieces."""
        pieces = [_pieces(text) for text in texts]
        encoded = self._encode([piece for text in pieces for piece in text])
        for text in pieces:
            yield np.concatenate([next(encoded) for _ in text])

    def _encode(self, texts: list[str]) -> Iterator[NDArray[np.integer]]:
        for start in range(0, len(texts), _BATCH_SIZE):
            batch = texts[start : start + _BATCH_SIZE]
            for encoding in self._bpe.encode_batch_fast(
                batch, add_special_tokens=False
            ):
                yield np.array(encoding.ids, np.int32)

    def decode(self, tokens: Iterable[int]) -> str:
        """See `Tokenizer`."""
        return self._bpe.decode([*tokens])

    def to_json(self) -> str:
        """See `Tokenizer`."""
        return self._bpe.to_str()


def train_tokenizer(pieces: Iterable[str], *, vocab_size: int) -> str:
    """Learns byte-level BPE with GPT-2's word pattern; returns its JSON.

    Pieces too few for `vocab_size` tokens leave the ids before the last unused.
    """
    bpe = tokenizers.Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size - 1,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(pieces, trainer)
    return bpe.to_str()


def load_tokenizer(json: str, *, vocab_size: int) -> Tokenizer:
    """Makes the tokenizer that `json` describes; "" describes bytes."""
    return BPETokenizer(json, vocab_size) if json else ByteTokenizer(vocab_size)


def read_tokenizer(path: Path) -> tuple[str, int]:
    """Returns the JSON of a tokenizer.json, and the smallest vocab_size that holds it.

    Raises:
      ValueError: no tokenizer, or one that is not byte level.
    """
    try:
        json = path.read_text(encoding="utf-8")
        bpe = tokenizers.Tokenizer.from_str(json)
    except Exception as error:  # the library's errors have no type of their own
        raise ValueError(
            f"tokenizer: {str(path)!r} must be a tokenizer.json, got: {error}. Pass "
            '"bpe", "bytes", or the path of such a file.'
        ) from error
    try:
        return json, _describe(json, bpe)[0]
    except ValueError as error:
        raise ValueError(f"{error} The file is {str(path)!r}.") from error


def sample_places(
    lengths: NDArray[np.integer], size: float
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Draws pieces of the texts, without repetition, to about `size` characters.

    Args:
      lengths: [n] of the texts, in characters.
      size: characters to draw; the pieces are the texts' parts of 2**14.

    Returns:
      text and start of each piece, in the order drawn.
    """
    counts = -(-lengths // _SAMPLE_CHARS)
    text = np.repeat(np.arange(len(lengths)), counts)
    first = np.repeat(np.cumsum(counts) - counts, counts)
    start = (np.arange(len(text)) - first) * _SAMPLE_CHARS
    drawn = np.random.default_rng(0).permutation(len(text))
    text, start = text[drawn], start[drawn]
    sizes = np.cumsum(np.minimum(lengths[text] - start, _SAMPLE_CHARS))
    count = int(np.searchsorted(sizes, size)) + 1
    return text[:count], start[:count]


def piece(text: str, start: int) -> str:
    """Returns the piece of a text that `sample_places` drew."""
    return text[start : start + _SAMPLE_CHARS]


def sample_size(vocab_size: int) -> int:
    """Returns the characters that teach so many tokens: 4096 for each."""
    return _TRAIN_CHARS * vocab_size


def _describe(
    text: str, bpe: tokenizers.Tokenizer
) -> tuple[int, int | None, dict[int, str]]:
    """Returns the least vocab_size, the own <|endoftext|>, and the added tokens' text.

    The last is "" for special tokens, which spell nothing.
    """
    value = json.loads(text)
    if "ByteLevel" not in (decoders_found := _types(value.get("decoder"))):
        raise ValueError(
            "tokenizer: must be byte level (with a ByteLevel decoder), as bits per "
            f"byte count its tokens' bytes, got decoders {decoders_found}. "
            'Take another, or train one with tokenizer="bpe".'
        )
    added = value.get("added_tokens", [])
    ids = {token["content"]: token["id"] for token in added}
    endoftext = next((ids[name] for name in _ENDS_OF_TEXT if name in ids), None)
    least = max(bpe.get_vocab().values()) + 1 + (endoftext is None)
    spelled = {t["id"]: "" if t["special"] else t["content"] for t in added}
    return least, endoftext, spelled


def _types(node: Any) -> list[str]:
    if not isinstance(node, dict):
        return []
    return [node["type"], *(t for n in node.get("decoders", []) for t in _types(n))]


def _pieces(text: str) -> list[str]:
    starts = range(0, max(len(text), 1), _PIECE_CHARS)
    return [text[start : start + _PIECE_CHARS] for start in starts]
