import dataclasses

import pytest

from experiments.many_runs import found
from experiments.many_runs.found import STUDIES, Found
from experiments.study import Results
from tests.experiments.many_runs.cases import RUN, row


def test_runs_of_studies_count_on_their_own_text(tmp_path, monkeypatch):
    monkeypatch.setattr(found, "_FOLDER", tmp_path)
    runs = [dataclasses.replace(RUN, seed=seed) for seed in range(3)]
    for folder, run, corpus in zip(("", *STUDIES[:2]), runs, "abb", strict=True):
        Results(tmp_path / folder / "results.jsonl").add(row(run, corpus=corpus))
    of = lambda name, **text: [
        r["seed"] for r in Found.of(tmp_path / name / "results.jsonl", **text).rows
    ]
    assert of("") == [0] and of(STUDIES[0]) == [1, 2]
    assert of("none") == [1, 2] and of("none", corpus="a") == []
    with pytest.raises(ValueError, match="the text of the runs that are compared"):
        of("", corpus="b")


def test_rows_of_another_study_are_no_runs(tmp_path):
    results = Results(tmp_path / "results.jsonl")
    results.add({"section": "captures", "step": 100, "seed": 0})
    with pytest.raises(ValueError, match="got one without policy, model, tokens"):
        Found.of(results.path)
