"""Text that is evaluated, and never trained on."""

import json

import numpy as np
import pytest

from fp4jax import data
from fp4jax.data import DataConfig
from fp4jax.data.tokenizers import ByteTokenizer

BYTES = ByteTokenizer(257)


def read(source, tokenizer=BYTES):
    return data.read_heldout(DataConfig(source=str(source)), tokenizer)


@pytest.fixture
def texts(tmp_path):
    for name, text in (("a", "first"), ("b", "second"), ("c", "first")):
        (tmp_path / f"{name}.txt").write_text(text)
    return tmp_path


def test_all_documents_are_held_out_and_end_in_endoftext(texts):
    corpus = read(texts)
    (domain,) = corpus.domains
    assert [bytes(d[:-1].tolist()) for d in domain.heldout] == [
        b"first",
        b"second",
        b"first",
    ]
    assert all(document[-1] == 256 for document in domain.heldout)
    assert corpus.num_train_tokens == 0
    config = DataConfig(sequence_length=4, batch_size=2)
    batches = list(data.heldout_batches(corpus, config))
    assert sum(batch["loss_mask"].sum() for batch in batches) == 16


def test_domains_are_those_of_a_mixture(texts):
    path = texts / "both.json"
    domains = [{"name": n, "source": f"{n}.txt"} for n in "ab"]
    path.write_text(json.dumps({"domains": domains}))
    assert [domain.name for domain in read(path).domains] == ["a", "b"]
    assert read(path).fingerprint != read(texts / "a.txt").fingerprint


def test_a_tokenized_folder_gives_its_heldout_documents(texts, tmp_path):
    for i in range(30):
        (texts / f"{i}.txt").write_text(f"text {i}")
    config = DataConfig(source=str(texts), tokenizer="bytes", holdout=0.5)
    folder = tmp_path / "tokens"
    data.write_corpus(config, folder)
    found, whole = read(folder, ByteTokenizer(512)), data.load_corpus(config)
    np.testing.assert_array_equal(
        found.domains[0].heldout.tokens[:], whole.domains[0].heldout.tokens[:]
    )
    with pytest.raises(ValueError, match="tokens of the run's tokenizer"):
        read(folder)  # of another vocabulary


@pytest.mark.parametrize("text", ["", None])
def test_a_source_without_text_raises(tmp_path, text):
    if text is not None:
        (tmp_path / "a.txt").write_text(text)
    with pytest.raises(ValueError, match="source must"):
        read(tmp_path)
