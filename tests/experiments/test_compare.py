"""What stands beside the runs: fitted once, and stopped by a signal."""

import pytest

from experiments import ngram, presets, record
from experiments.compare import Comparison
from experiments.folder import Folder
from experiments.trial import Stopped
from fp4jax import data


@pytest.fixture
def compare(tmp_path, monkeypatch):
    """Makes a comparison in the same folder again and again, and its baselines."""
    monkeypatch.setenv("FP4JAX_CACHE", str(tmp_path / "cache"))
    texts = tmp_path / "texts"
    texts.mkdir()
    for i in range(20):
        (texts / f"{i}.txt").write_text(f"Text {i} counts to {i * i}. " * 5)
    fields = ("vocab_size=260", "sequence_length=32", "holdout=0.2")
    config = presets.resolve(
        data=str(texts), steps=3, assignments=[f"data.{field}" for field in fields]
    )
    corpus = data.load_corpus(config.data)
    description = record.describe(config, corpus=corpus, command="")

    def baselines(stop):
        with Folder(tmp_path / "run", description, resume=True) as folder:
            comparison = Comparison(
                config=config,
                corpus=corpus,
                folder=folder,
                description=description,
                stop=stop,
            )
            return list(comparison.baselines())

    return baselines


def test_baselines_are_fitted_once(compare, monkeypatch):
    found = compare(lambda: False)
    assert [each.name for each in found] == ["2-gram", "3-gram"]
    monkeypatch.setattr(ngram, "fit", None)
    assert compare(lambda: False) == found


def test_a_signal_stops_their_fit_and_evaluation_and_keeps_what_is_done(compare):
    asked = []

    def stop_at(number):
        asked.clear()
        return lambda: asked.append(0) or len(asked) >= number

    with pytest.raises(Stopped):
        compare(stop_at(2))  # a fit
    with pytest.raises(Stopped):
        compare(stop_at(4))  # an evaluation
    whole = compare(lambda: False)
    assert compare(stop_at(1)) == whole
