"""What is written is mapped back, and damage is named where it lies."""

import json
import pickle
import re

import numpy as np
import pytest

from fp4jax.data import shards
from fp4jax.data.shards import ShardWriter, open_split

DOCUMENTS = [np.arange(start, start + 5) for start in range(0, 50, 5)]
FLAT = np.arange(50)


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
    for document in (FLAT, DOCUMENTS[0]):
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


def test_a_token_beyond_the_vocabulary_is_named_where_it_lies(folder):
    path = folder / "text" / "train-00001.tokens.npy"
    tokens, _ = opened(folder, vocab_size=33)  # 33 is token 13 of shard 1
    np.testing.assert_array_equal(tokens[:33], FLAT[:33])
    message = f"below vocab_size=33, got 33 at position 13 of '{re.escape(str(path))}'"
    for index in (slice(None), np.array([[40, 2], [33, 34]])):
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
    shard = {"name": "a", "tokens": 5, "documents": 1} | changes
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
    ],
)
def test_an_index_that_was_edited_is_named(tmp_path, index):
    (tmp_path / "index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"index\.json' must be a readable index"):
        shards.read_index(tmp_path)
