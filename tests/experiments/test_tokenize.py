"""A tokenized folder trains as its text does, and a failure leaves nothing behind."""

import dataclasses
import itertools
import json
import sys

import numpy as np
import pytest

from experiments import presets, tokenize
from fp4jax import data
from fp4jax.data import DataConfig, shards


@pytest.fixture
def texts(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for i in range(40):
        (folder / f"{i:02}.txt").write_text(f"document {i}: " + "words, " * i)
    return folder


def run(texts, out, *more):
    return tokenize.main(["--data", str(texts), "--out", str(out), *more])


def drawn(config):
    corpus = data.load_corpus(config)
    batches = itertools.islice(data.train_batches(corpus, config), 5)
    return corpus, [*batches, *data.heldout_batches(corpus, config)]


@pytest.mark.parametrize("tokenizer", ["bpe", "bytes"])
def test_a_folder_gives_the_batches_of_its_text(texts, tmp_path, tokenizer, capsys):
    out = tmp_path / "tokens"
    sized = ["--vocab-size", "290", "--tokenizer", tokenizer]
    assert run(texts, out, "--holdout", "0.2", *sized) == 0
    assert "vocabulary 290" in capsys.readouterr().out

    adopted = presets.resolve(data=str(out), assignments=["data.sequence_length=16"])
    assert adopted.model.vocab_size == adopted.data.vocab_size == 290
    written = DataConfig(
        source=str(texts),
        tokenizer=tokenizer,
        vocab_size=290,
        holdout=0.2,
        sequence_length=16,
    )
    corpus, batches = drawn(adopted.data)
    expected_corpus, expected_batches = drawn(written)
    assert corpus.fingerprint == expected_corpus.fingerprint
    np.testing.assert_array_equal(corpus.token_bytes, expected_corpus.token_bytes)
    for batch, expected in zip(batches, expected_batches, strict=True):
        for name, value in expected.items():
            np.testing.assert_array_equal(batch[name], value)


def test_a_mixture_becomes_one_folder(texts, tmp_path, capsys):
    lines = [json.dumps({"body": f"line {i} " * 9}) for i in range(30)]
    (tmp_path / "lines.jsonl").write_text("\n".join(lines))
    domains = [
        {"name": "english", "source": "texts", "weight": 3},
        {"name": "lines", "source": "lines.jsonl", "text_field": "body"},
    ]
    mixture = tmp_path / "mixture.json"
    mixture.write_text(json.dumps({"domains": domains}))
    out = tmp_path / "tokens"
    assert run(mixture, out, "--vocab-size", "300") == 0
    assert "english" in capsys.readouterr().out
    corpus = data.load_corpus(presets.resolve(data=str(out)).data)
    assert [(d.name, d.weight) for d in corpus.domains] == [
        ("english", 3),
        ("lines", 1),
    ]
    lines = corpus.domains[1]
    found = {
        corpus.tokenizer.decode(d) for s in (lines.train, lines.heldout) for d in s
    }
    assert found == {f"line {i} " * 9 for i in range(30)}


def test_a_tokenizer_file_is_taken_over(texts, tmp_path):
    assert run(texts, tmp_path / "one", "--vocab-size", "290") == 0
    file = tmp_path / "one" / "tokenizer.json"
    assert run(texts, tmp_path / "other", "--tokenizer", str(file)) == 0
    one, other = (
        data.load_corpus(presets.resolve(data=str(tmp_path / name)).data)
        for name in ("one", "other")
    )
    assert one.tokenizer.to_json() == other.tokenizer.to_json()
    config = presets.resolve(assignments=[f"data.tokenizer={file}"])
    assert config.model.vocab_size == (least := len(other.token_bytes))
    changes = [f"data.tokenizer={file}", "data.vocab_size=257"]
    with pytest.raises(ValueError, match=f"data.vocab_size must be at least {least}"):
        presets.resolve(assignments=changes)
    larger = presets.resolve(assignments=[changes[0], "data.vocab_size=512"])
    assert larger.model.vocab_size == 512


def test_shards_are_bounded(texts, tmp_path):
    config = DataConfig(source=str(texts), tokenizer="bytes", vocab_size=257)
    whole = data.write_corpus(config, tmp_path / "whole")
    index = data.write_corpus(config, tmp_path / "parts", shard_tokens=300)
    (domain,), (one,) = index["domains"], whole["domains"]
    sizes = [shard["tokens"] for shard in domain["train"]["shards"]]
    assert len(sizes) > 10 and max(sizes) <= 300
    assert domain["train"]["tokens"] == one["train"]["tokens"]
    inputs = {}
    for folder in ("whole", "parts"):
        _, batches = drawn(dataclasses.replace(config, source=str(tmp_path / folder)))
        inputs[folder] = np.concatenate([batch["inputs"] for batch in batches])
    np.testing.assert_array_equal(inputs["whole"], inputs["parts"])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--vocab-size", "100"], "vocab_size must be at least 257"),
        (["--tokenizer", "words"], "tokenizer must be one of bpe, bytes"),
        (["--tokenizer", "no.json"], "'no.json' must be a tokenizer.json"),
        (["--text-field", "body"], 'text_field must be "text"'),
        (["--holdout", "2"], "holdout must be above 0"),
        (["--data", "nowhere"], "source='nowhere', which does not exist"),
        (["--data", "hf:no/such"], "needs the package datasets"),
        (["--out", "OCCUPIED"], "--out: must be a new or an empty folder"),
    ],
    ids=str,
)
def test_an_error_is_one_line_and_leaves_nothing(
    texts, tmp_path, monkeypatch, capsys, arguments, message
):
    monkeypatch.setitem(sys.modules, "datasets", None)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "OCCUPIED").mkdir()
    (tmp_path / "OCCUPIED" / "file").touch()
    before = sorted(tmp_path.rglob("*"))
    assert run(texts, tmp_path / "tokens", *arguments) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ") and message in error
    assert sorted(tmp_path.rglob("*")) == before


def test_a_failure_on_the_way_leaves_nothing(texts, tmp_path, monkeypatch, capsys):
    def fail(folder, index):
        raise OSError("No space left on device")

    monkeypatch.setattr(shards, "write_index", fail)
    before = sorted(tmp_path.rglob("*"))
    assert run(texts, tmp_path / "tokens", "--vocab-size", "257") == 2
    assert "No space left" in capsys.readouterr().err
    assert sorted(tmp_path.rglob("*")) == before


def test_tokens_are_not_tokenized_again(texts, tmp_path, capsys):
    assert run(texts, tmp_path / "tokens", "--tokenizer", "bytes") == 0
    assert run(tmp_path / "tokens", tmp_path / "again") == 2
    assert "which is tokenized already" in capsys.readouterr().err


def test_settings_that_the_folder_decides_otherwise_raise(texts, tmp_path):
    assert run(texts, tmp_path / "tokens", "--tokenizer", "bytes") == 0
    source = str(tmp_path / "tokens")
    with pytest.raises(ValueError, match="load_corpus: tokenizer must be 'bytes', as"):
        data.load_corpus(DataConfig(source=source))


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("vocab_size=512", "must be 257, as .* got 512"),
        ("holdout=0.5", "must be 0.25, as .* got 0.5"),
        ("tokenizer=bpe", "must be 'bytes', as .* got 'bpe'"),
    ],
)
def test_assignments_that_the_data_decides_otherwise_raise(
    assignment, message, texts, tmp_path
):
    arguments = "--tokenizer", "bytes", "--holdout", "0.25"
    assert run(texts, tmp_path / "tokens", *arguments) == 0
    name = f"data.{assignment.partition('=')[0]}"
    message = f"^--set: {name} {message}. Leave out --set {name}.$"
    with pytest.raises(ValueError, match=message):
        presets.resolve(
            data=str(tmp_path / "tokens"), assignments=[f"data.{assignment}"]
        )


def test_help_tells_the_truth(capsys):
    with pytest.raises(SystemExit) as caught:
        tokenize.main(["--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    for word in ("--data", "--out", "--vocab-size", "32768", "exit status 2"):
        assert word in text
