"""Text survives both tokenizers, and every token knows its bytes."""

import numpy as np
import pytest
import tokenizers as huggingface

from fp4jax.data import tokenizers
from fp4jax.data.tokenizers import (
    load_tokenizer,
    read_tokenizer,
    sample_places,
    train_tokenizer,
)

TEXTS = [
    "def f(x):\n    return x\n" * 40,
    "na\u00efve \U0001f600 \0 <|endoftext|>",
    " ",
]
EVERY_BYTE = "".join(map(chr, [*range(0x800), 0x8000, 0x20000, 0x100000]))


@pytest.fixture(params=["bpe", "bytes"])
def kind(request):
    return request.param


def make(kind):
    json = train_tokenizer(TEXTS, vocab_size=300) if kind == "bpe" else ""
    return load_tokenizer(json, vocab_size=300)


@pytest.fixture
def tokenizer(kind):
    return make(kind)


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
    bpe, by_byte = (encode(make(kind), TEXTS[0]) for kind in ("bpe", "bytes"))
    assert len(bpe) < size / 2
    assert list(by_byte) == list(TEXTS[0].encode())


def test_every_id_is_counted(tokenizer):
    assert tokenizer.token_bytes.shape == (300,)
    assert tokenizer.token_bytes.dtype == np.int32
    assert np.count_nonzero(tokenizer.token_bytes == 1) >= 256
    assert tokenizer.token_bytes[299] == 0


def test_training_is_deterministic_and_json_restores_it(kind, tokenizer):
    json = tokenizer.to_json()
    assert make(kind).to_json() == json
    restored = load_tokenizer(json, vocab_size=300)
    assert restored.endoftext == tokenizer.endoftext == 299
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
    texts = ["a" * 95, "b" * 5, ""]
    lengths = np.array([len(text) for text in texts])

    def sampled(size):
        places = zip(*sample_places(lengths, size), strict=True)
        return [tokenizers.piece(texts[text], start) for text, start in places]

    assert sum(map(len, sampled(42))) in (45, 50)  # with the short piece, or without
    assert sorted("".join(sampled(1000))) == sorted("".join(texts))


@pytest.fixture
def file(tmp_path):
    """A tokenizer.json as others publish it: special tokens, and one that is text."""
    bpe = huggingface.Tokenizer.from_str(train_tokenizer(TEXTS, vocab_size=290))
    bpe.add_special_tokens(["<|endoftext|>", "<|user|>"])
    bpe.add_tokens(["return x"])
    bpe.enable_truncation(4)
    bpe.enable_padding(length=9)
    bpe.save(str(tmp_path / "tokenizer.json"))
    return tmp_path / "tokenizer.json"


def test_a_tokenizer_file_keeps_its_own_endoftext(file):
    json, least = read_tokenizer(file)
    size = huggingface.Tokenizer.from_file(str(file)).get_vocab_size()
    assert least == size
    tokenizer = load_tokenizer(json, vocab_size=least)
    assert tokenizer.endoftext == size - 3
    for text in TEXTS:
        tokens = encode(tokenizer, text)
        assert tokenizer.decode(tokens) == text
        assert tokenizer.token_bytes[tokens].sum() == len(text.encode())
        assert not {size - 3, size - 2} & {*tokens.tolist()}
    assert size - 1 in encode(tokenizer, TEXTS[0])
    assert list(tokenizer.token_bytes[-3:]) == [0, 0, len("return x")]


def test_a_tokenizer_file_without_endoftext_gets_one_more_id(tmp_path):
    path = tmp_path / "tokenizer.json"
    path.write_text(train_tokenizer(TEXTS, vocab_size=290))
    json, least = read_tokenizer(path)
    assert load_tokenizer(json, vocab_size=least).endoftext == least - 1
    with pytest.raises(
        ValueError, match=f"must be at least {least}, .* got vocab_size"
    ):
        load_tokenizer(json, vocab_size=least - 1)


def test_files_that_are_no_byte_level_tokenizer_raise(tmp_path):
    path = tmp_path / "tokenizer.json"
    with pytest.raises(ValueError, match="must be a tokenizer.json, got.*No such file"):
        read_tokenizer(path)
    path.write_text("{}")
    with pytest.raises(ValueError, match="must be a tokenizer.json, got"):
        read_tokenizer(path)
    huggingface.Tokenizer(huggingface.models.WordPiece()).save(str(path))
    with pytest.raises(ValueError, match=r"must be byte level.*got decoders \[\]"):
        read_tokenizer(path)
