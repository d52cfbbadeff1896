"""Splits, the cache of tokens, and settings out of range."""

import dataclasses
import json

import numpy as np
import pytest

from fp4jax.data import DataConfig, corpus, load_corpus, sources, tokenizers


@pytest.fixture
def config(tmp_path, monkeypatch):
    monkeypatch.setenv("FP4JAX_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "text"
    folder.mkdir()
    for i in range(20):
        (folder / f"{i:02}.txt").write_text(f"document {i}: " + "words, " * i)
    return DataConfig(source=str(folder), vocab_size=280, holdout=0.2)


def texts(loaded, split):
    return [loaded.tokenizer.decode(document) for document in split]


def splits(loaded):
    (domain,) = loaded.domains
    return domain.train, domain.heldout


@pytest.mark.parametrize("tokenizer", ["bpe", "bytes"])
@pytest.mark.parametrize("vocab_size", [280, 70_000])
def test_every_document_is_in_one_split(config, tmp_path, tokenizer, vocab_size):
    config = dataclasses.replace(config, tokenizer=tokenizer, vocab_size=vocab_size)
    loaded = load_corpus(config)
    train, heldout = (texts(loaded, split) for split in splits(loaded))
    assert train and heldout
    files = [p.read_text() for p in (tmp_path / "text").iterdir()]
    assert sorted(train + heldout) == sorted(files)
    assert loaded.token_bytes.shape == (vocab_size,)
    for split in splits(loaded):
        assert all(document[-1] == vocab_size - 1 for document in split)
        assert np.count_nonzero(split.tokens[:] == vocab_size - 1) == len(split)
        assert split.num_targets == sum(len(document) - 1 for document in split)


def test_the_tokenizer_learns_from_the_training_split_only(config, monkeypatch):
    learned = []

    train_tokenizer = tokenizers.train_tokenizer

    def spy(pieces, **settings):
        learned.extend(pieces)
        return train_tokenizer(pieces, **settings)

    monkeypatch.setattr(tokenizers, "train_tokenizer", spy)
    loaded = load_corpus(config)
    assert sorted(learned) == sorted(texts(loaded, splits(loaded)[0]))


def test_the_cache_returns_what_was_made(config, tmp_path, monkeypatch):
    made = load_corpus(config)
    monkeypatch.setattr(corpus, "_make", None)  # a second call must not reach it
    kept = load_corpus(config)
    assert made.fingerprint == kept.fingerprint
    for before, after in zip(splits(made), splits(kept), strict=True):
        np.testing.assert_array_equal(before.tokens[:], after.tokens[:])
        np.testing.assert_array_equal(before.ends, after.ends)
    assert made.tokenizer.to_json() == kept.tokenizer.to_json()
    (path,) = (tmp_path / "cache").iterdir()  # and nothing half-written
    assert path.name.startswith("corpus-")


@pytest.mark.parametrize(
    "change", [{"vocab_size": 281}, {"tokenizer": "bytes"}, {"holdout": 0.5}], ids=str
)
def test_the_cache_knows_every_setting(config, tmp_path, change):
    load_corpus(config)
    load_corpus(dataclasses.replace(config, **change))
    assert len(list((tmp_path / "cache").iterdir())) == 2


def test_batches_share_one_cache(config, tmp_path):
    load_corpus(config)
    load_corpus(dataclasses.replace(config, seed=1, batch_size=3, sequence_length=9))
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_an_unwritable_cache_is_reported(config, tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("not a folder")
    monkeypatch.setenv("FP4JAX_CACHE", str(tmp_path / "file"))
    loaded = load_corpus(config)
    assert texts(loaded, splits(loaded)[0])
    assert "The corpus is not cached: " in caplog.text


def test_text_that_cannot_be_read_again_is_no_matter_of_the_cache(
    config, tmp_path, monkeypatch, caplog
):
    make = corpus._make

    def fail(stream):
        raise OSError("Input/output error")
        yield

    def broken(*arguments):
        monkeypatch.setattr(sources, "_parts", fail)
        return make(*arguments)

    monkeypatch.setattr(corpus, "_make", broken)
    with pytest.raises(ValueError, match="must be readable, .*text'.* Input/output"):
        load_corpus(config)
    assert not caplog.text and not list((tmp_path / "cache").iterdir())


def test_a_truncated_cache_is_made_anew(config, tmp_path, caplog):
    first = texts(loaded := load_corpus(config), splits(loaded)[0])
    path = next((tmp_path / "cache").rglob("train-*.tokens.npy"))
    path.write_bytes(path.read_bytes()[:-1])
    again = load_corpus(config)
    assert texts(again, splits(again)[0]) == first
    assert "is made anew" in caplog.text


def test_documents_without_anything_to_predict_raise(config, tmp_path):
    for i, path in enumerate(sorted((tmp_path / "text").iterdir())):
        path.write_text(chr(ord("a") + i))
    config = dataclasses.replace(config, tokenizer="bytes")
    with pytest.raises(ValueError, match="must hold text to predict.*got none"):
        load_corpus(config)


def test_the_cache_follows_the_environment(config, tmp_path, monkeypatch):
    monkeypatch.delenv("FP4JAX_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    load_corpus(config)
    assert len(list((tmp_path / "xdg" / "fp4jax").iterdir())) == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokenizer": "wordpiece"}, "one of bpe, bytes, .* got tokenizer='wordpiece'"),
        ({"vocab_size": 256}, "at least 257, .* got vocab_size=256"),
        ({"sequence_length": 0}, "at least 1, got sequence_length=0"),
        ({"batch_size": 0}, "at least 1, got batch_size=0"),
        ({"holdout": 0.0}, "above 0 and below 1, got holdout=0.0"),
        ({"holdout": float("nan")}, "above 0 and below 1, got holdout=nan"),
        ({"source": ""}, "'stdlib', a folder or a file, got source=''"),
        ({"workers": -1}, "at least 0, got workers=-1"),
        ({"seed": -1}, r"from 0 to 2\*\*32 - 1, got seed=-1"),
        (
            {"source": "texts", "site_packages": True},
            "False unless source=\"stdlib\", as source='texts', got site_packages=True",
        ),
    ],
    ids=str,
)
def test_bad_values_raise(change, message):
    name = next((n for n in change if n != "source"), "source")
    with pytest.raises(ValueError, match=f"^DataConfig: {name} must be {message}"):
        DataConfig(**change)


def test_config_is_a_plain_value():
    config = DataConfig(vocab_size=300)
    assert DataConfig(**json.loads(json.dumps(dataclasses.asdict(config)))) == config
    assert hash(config) == hash(DataConfig(vocab_size=300))
