"""What is written is mapped back, and damage is named where it lies."""

import json
import os
import pickle
import re

import numpy as np
import pytest

from fp4jax.data import cache, shards
from fp4jax.data.shards import ShardWriter, open_split

# Ten documents that count on, each closed by 49.
DOCUMENTS = [np.array([*range(start, start + 4), 49]) for start in range(0, 50, 5)]
FLAT = np.concatenate(DOCUMENTS)


@pytest.fixture
def folder(tmp_path):
    """Three shards of 20, 20 and 10 tokens."""
    writer = ShardWriter(tmp_path, "text/train", vocab_size=50, size=22)
    for document in DOCUMENTS:
        writer.append(document)
    (tmp_path / "split.json").write_text(json.dumps(writer.finish()))
    return tmp_path


def split_of(folder):
    return json.loads((folder / "split.json").read_text())


def opened(folder, vocab_size=50):
    return open_split(folder, split_of(folder), vocab_size=vocab_size)


def test_documents_come_back(folder):
    split = split_of(folder)
    assert (split["tokens"], split["documents"]) == (50, 10)
    assert [shard["tokens"] for shard in split["shards"]] == [20, 20, 10]
    tokens, ends = opened(folder)
    np.testing.assert_array_equal(ends, np.arange(5, 51, 5))
    np.testing.assert_array_equal(tokens[:], FLAT)
    for index in (slice(18, 23), slice(7, 7), np.array([[49, 0], [19, 20]])):
        np.testing.assert_array_equal(tokens[index], FLAT[index])
    assert len(tokens) == 50 and tokens[:].dtype == np.uint16


def test_large_vocabularies_take_four_bytes(tmp_path):
    writer = ShardWriter(tmp_path, "train", vocab_size=2**16 + 1)
    writer.append(np.array([3, 2**16]))
    tokens, _ = open_split(tmp_path, writer.finish(), vocab_size=2**16 + 1)
    assert tokens[:].tolist() == [3, 2**16] and tokens[:].dtype == np.uint32


def test_one_document_may_be_larger_than_a_shard(tmp_path):
    writer = ShardWriter(tmp_path, "train", vocab_size=50, size=22)
    for document in (FLAT, DOCUMENTS[0]):  # the first closes more than once
        writer.append(document)
    tokens, ends = open_split(tmp_path, writer.finish(), vocab_size=50)
    assert ends.tolist() == [50, 55] and len(tokens) == 55


def test_a_pickle_holds_no_tokens(folder):
    tokens, _ = opened(folder)
    copy = pickle.loads(data := pickle.dumps(tokens))
    assert len(data) < 1000
    np.testing.assert_array_equal(copy[:], FLAT)


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


def overwrite(path):
    path.write_bytes(b"no array")


@pytest.mark.parametrize("kind", ["tokens", "ends"])
@pytest.mark.parametrize(
    ("damage", "found"),
    [
        (lambda path: path.unlink(), "No such file"),
        (truncate, "mmap length is greater than file size"),
        (overwrite, "."),
        (lambda path: np.save(path, np.load(path)[1:]), r"\(\d+,\) of u?int"),
        (lambda path: np.save(path, np.load(path).astype(np.int16)), "of int16"),
    ],
    ids=["missing", "truncated", "overwritten", "of another size", "of another type"],
)
def test_a_damaged_shard_is_named(folder, kind, damage, found):
    path = folder / "text" / f"train-00001.{kind}.npy"
    damage(path)
    message = f"^tokens: '{re.escape(str(path))}' must be .*{found}.*copy it anew"
    with pytest.raises(ValueError, match=message):
        opened(folder)


def test_ends_that_do_not_fit_their_shard_are_named(folder):
    path = folder / "text" / "train-00000.ends.npy"
    np.save(path, np.array([5, 4, 15, 20]))
    with pytest.raises(ValueError, match="00000.ends.npy' must be ends that rise"):
        opened(folder)


def rewrite(path, change):
    tokens = np.load(path)
    change(tokens)
    np.save(path, tokens)


def swap(tokens):
    tokens[[0, 1]] = tokens[[1, 0]]


def test_a_shard_that_was_rewritten_is_named(folder):
    opened(folder)
    path = folder / "text" / "train-00001.tokens.npy"
    rewrite(path, swap)  # as many tokens, all in the vocabulary
    message = rf"'{re.escape(str(path))}' must be of SHA-256 \w{{64}}, got \w{{64}}\."
    with pytest.raises(ValueError, match=message):
        opened(folder)


def test_shards_that_were_exchanged_are_named(folder):
    first, second = (folder / "text" / f"train-0000{i}.tokens.npy" for i in (0, 1))
    data = first.read_bytes()
    second.replace(first)
    second.write_bytes(data)
    with pytest.raises(ValueError, match="train-00000.tokens.npy' must be of SHA-256"):
        opened(folder)


def test_ends_inside_of_documents_are_named(folder):
    path = folder / "text" / "train-00001.ends.npy"
    np.save(path, np.array([4, 10, 15, 20]))
    with pytest.raises(ValueError, match="00001.ends.npy' must be ends at <"):
        opened(folder)


def test_a_large_shard_is_read_once_and_after_every_change(folder, monkeypatch):
    monkeypatch.setenv("FP4JAX_CACHE", str(folder / "cache"))
    monkeypatch.setattr(cache, "_LARGE", 0)
    read = []
    load = np.load

    def spy(path, **settings):
        read.append(path.name)
        return load(path, **settings)

    def times(name):
        return read.count(f"train-0000{name}.tokens.npy")

    monkeypatch.setattr(np, "load", spy)
    opened(folder)
    assert times(1) == 2  # mapped, and checked
    opened(folder)
    assert times(1) == 3
    path = folder / "text" / "train-00001.tokens.npy"
    before = path.stat()
    rewrite(path, swap)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(ValueError, match="must be of SHA-256"):
        opened(folder)


def test_without_a_cache_shards_are_read_each_time(folder, monkeypatch):
    (folder / "file").write_text("no folder")
    monkeypatch.setenv("FP4JAX_CACHE", str(folder / "file"))
    monkeypatch.setattr(cache, "_LARGE", 0)
    for _ in range(2):
        np.testing.assert_array_equal(opened(folder)[0][:], FLAT)


def test_a_token_beyond_the_vocabulary_is_named_where_it_lies(folder):
    path = folder / "text" / "train-00001.tokens.npy"
    tokens, _ = opened(folder, vocab_size=33)  # 33 is token 13 of shard 1
    np.testing.assert_array_equal(tokens[:4], FLAT[:4])
    message = f"below vocab_size=33, got 33 at position 13 of '{re.escape(str(path))}'"
    for index in (slice(33, 34), np.array([[40, 2], [33, 35]])):
        with pytest.raises(ValueError, match=f"^tokens: every token.*{message}"):
            tokens[index]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "must be a readable index, got FileNotFoundError"),
        ("{", "must be a readable index, got JSONDecodeError"),
        ("[]", "must be a readable index, got TypeError"),
        ('{"format": 1}', r"must be a readable index, got KeyError\('tokenizer'\)"),
        ('{"format": 99}', "must be format 1, got format 99"),
    ],
)
def test_an_unknown_index_is_named(tmp_path, text, message):
    if text is not None:
        (tmp_path / shards.INDEX).write_text(text)
    with pytest.raises(ValueError, match=f"^tokens: .*{message}"):
        shards.read_index(tmp_path)


def test_the_fingerprint_follows_all_but_the_source():
    index = {"source": "a", "vocab_size": 300, "domains": [{"weight": 1.0}]}
    fingerprint = shards.fingerprint(index)
    assert fingerprint == shards.fingerprint({**index, "source": "b"})
    assert fingerprint != shards.fingerprint({**index, "vocab_size": 301})


def split(**changes):
    shard = {"name": "a", "tokens": 5, "documents": 1, "sha256": ""} | changes
    return {"tokens": 5, "documents": 1, "shards": [shard]}


def whole_index(**changes):
    domain = {"name": "a", "weight": 1.0, "train": split(), "heldout": split()}
    return {
        "format": shards.FORMAT,
        "tokenizer": "bytes",
        "tokenizer_sha256": "",
        "vocab_size": 300,
        "holdout": 0.1,
        "domains": [domain | changes],
    }


def test_a_whole_index_is_read(tmp_path):
    (tmp_path / "index.json").write_text(json.dumps(whole_index()))
    assert shards.read_index(tmp_path) == whole_index()


@pytest.mark.parametrize(
    "index",
    [
        whole_index() | {"vocab_size": "a"},
        whole_index() | {"vocab_size": 0},
        whole_index() | {"holdout": None},
        whole_index() | {"tokenizer": 3},
        whole_index() | {"domains": []},
        whole_index() | {"domains": 2 * whole_index()["domains"]},
        whole_index(weight=0),
        whole_index(weight="x"),
        whole_index(train={"shards": []}),
        whole_index(train=split(tokens="5")),
        whole_index(heldout=split(documents=0)),
        whole_index(heldout=split(sha256=None)),
    ],
)
def test_an_index_that_was_edited_is_named(tmp_path, index):
    (tmp_path / "index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"index\.json' must be a readable index"):
        shards.read_index(tmp_path)
