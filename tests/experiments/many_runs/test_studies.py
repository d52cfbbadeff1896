"""The studies of many runs: their queues, and pages of made-up rows."""

import pytest

from experiments import study
from experiments.many_runs import tuning
from experiments.many_runs.found import STUDIES, Found
from experiments.scaling import fit
from tests.experiments.many_runs.cases import about, made_up, studies


@pytest.fixture
def few_draws(monkeypatch):
    """Intervals of fits are rough, and made in no time."""
    monkeypatch.setattr(fit, "_DRAWS", 20)


@studies
def test_the_queue_grows_to_the_plan_as_rates_are_found(name):
    queue, rows = about(name).queue, []
    for _ in range(3):
        found = Found(rows)
        rows += [made_up(run) for run in queue(found, None) if not found.row(run)]
    runs = queue(Found(rows), None)
    assert all(Found(rows).row(run) for run in runs)
    assert set(runs) == set(queue(Found([]), 2e-3))  # the best one of made-up rows
    assert len(set(runs)) == len(runs)


@studies
def test_pages_are_made_of_rows_or_say_that_there_are_none(name, tmp_path, few_draws):
    found = about(name)
    page = (found.folder / "README.md").read_text()
    nothing = found.parts(Found([]), tmp_path)
    study.filled(page, nothing)
    assert any("Not run yet" in part for part in nothing.values())
    rows = [made_up(run) for run in found.queue(Found([]), 2e-3)]
    everything = found.parts(Found(rows), tmp_path)
    assert "Not run yet" not in study.filled(page, everything)
    assert set(everything) == set(nothing)


@studies
def test_pages_stay_where_runs_diverge(name, tmp_path, few_draws):
    """At the highest rate, and one seed of ufp4, whose losses logs write as null."""
    found = about(name)
    rows = [made_up(run) for run in found.queue(Found([]), 2e-3)]
    for row in rows:
        is_seed = row["policy"] == "ufp4" and row["seed"] == 1
        if row["lr"] == tuning.RATES[-1] or is_seed:
            nothing = {"loss": None, "bits_per_byte": None}
            row |= {"heldout": {"bf16": {"all": nothing, "code": nothing}}}
            row |= {"diverged": True, "losses": [2.0, None], "flops": 1.0}
    queue = found.queue(Found(rows), None)
    assert all(Found(rows).row(run) for run in queue)  # rates were found
    page = "".join(found.parts(Found(rows), tmp_path).values())
    assert "diverged" in page and "nan" not in page
    assert "nan" not in "".join(found.front(Found(rows)).values())


def test_what_the_committed_rows_say_is_what_the_pages_show(tmp_path):
    for name in STUDIES:
        found = about(name)
        page = (found.folder / "README.md").read_text()
        rows = Found.of(found.folder / "results.jsonl")
        assert study.filled(page, found.parts(rows, tmp_path)) == page
        front = (found.folder.parents[1] / "README.md").read_text()
        assert study.filled(front, found.front(rows)) == front
