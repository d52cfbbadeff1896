"""Text survives both tokenizers, and every token knows its bytes."""

import numpy as np
import pytest

from fp4jax.data import tokenizers
from fp4jax.data.tokenizers import load_tokenizer, train_tokenizer

TEXTS = [
    "def f(x):\n    return x\n" * 40,
    "na\u00efve \U0001f600 \0 <|endoftext|>",
    " ",
]
EVERY_BYTE = "".join(map(chr, [*range(0x800), 0x8000, 0x20000, 0x100000]))


@pytest.fixture(params=["bpe", "bytes"])
def kind(request):
    return request.param


@pytest.fixture
def tokenizer(kind):
    return train_tokenizer(kind, TEXTS, vocab_size=300)


def encode(tokenizer, text):
    (tokens,) = tokenizer.encode([text])
    return tokens


@pytest.mark.parametrize("text", [*TEXTS, EVERY_BYTE, ""], ids=range(5))
def test_text_survives(tokenizer, text):
    tokens = encode(tokenizer, text)
    assert tokenizer.decode(tokens) == text
    assert tokenizer.decode([*tokens, 299]) == text
    assert tokenizer.token_bytes[tokens].sum() == len(text.encode())
    assert all(tokens < 299)  # spelling <|endoftext|> out does not end a text


def test_bpe_compresses_and_bytes_do_not():
    size = len(TEXTS[0].encode())
    bpe, by_byte = (
        encode(train_tokenizer(kind, TEXTS, vocab_size=300), TEXTS[0])
        for kind in ("bpe", "bytes")
    )
    assert len(bpe) < size / 2
    assert list(by_byte) == list(TEXTS[0].encode())


def test_every_id_is_counted(tokenizer):
    assert tokenizer.token_bytes.shape == (300,)
    assert tokenizer.token_bytes.dtype == np.int32
    assert np.count_nonzero(tokenizer.token_bytes == 1) >= 256
    assert tokenizer.token_bytes[299] == 0


def test_training_is_deterministic_and_json_restores_it(kind, tokenizer):
    json = tokenizer.to_json()
    assert train_tokenizer(kind, TEXTS, vocab_size=300).to_json() == json
    restored = load_tokenizer(kind, json, vocab_size=300)
    np.testing.assert_array_equal(restored.token_bytes, tokenizer.token_bytes)
    for before, after in zip(
        tokenizer.encode(TEXTS), restored.encode(TEXTS), strict=True
    ):
        np.testing.assert_array_equal(before, after)


def test_long_texts_are_encoded_in_pieces(tokenizer, monkeypatch):
    monkeypatch.setattr(tokenizers, "_PIECE_CHARS", 7)
    monkeypatch.setattr(tokenizers, "_BATCH_SIZE", 3)
    for text, tokens in zip(TEXTS, tokenizer.encode(TEXTS), strict=True):
        assert tokenizer.decode(tokens) == text


def test_training_reads_a_bounded_sample(monkeypatch):
    monkeypatch.setattr(tokenizers, "_SAMPLE_CHARS", 10)
    texts = ["a" * 95, "b" * 5]
    assert sum(map(len, tokenizers._sample(texts, 42))) == 50
    assert sorted("".join(tokenizers._sample(texts, 1000))) == sorted("".join(texts))
