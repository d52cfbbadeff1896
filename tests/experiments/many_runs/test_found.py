import dataclasses
import json

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


@pytest.mark.parametrize(
    ("foreign", "missing"),
    [
        ({"section": "captures", "step": 100, "seed": 0}, "policy, model, tokens"),
        (row(RUN), "corpus"),
        (3, "policy, model"),
    ],
    ids=["another study", "no text", "no row"],
)
def test_lines_that_are_no_runs_are_named(foreign, missing, tmp_path):
    path = tmp_path / "results.jsonl"
    rows = row(RUN, corpus="a"), foreign
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    expected = f"line 2 of '{path}' must be the result of a run, got one without "
    with pytest.raises(ValueError, match=expected + missing):
        Found.of(path)
