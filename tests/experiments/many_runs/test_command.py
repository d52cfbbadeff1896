import dataclasses

import numpy as np
import pytest

from experiments import record
from experiments.in_turn import ProcessDied
from experiments.many_runs import command, queue
from experiments.many_runs.command import Study
from experiments.many_runs.found import Found
from experiments.study import Results
from tests.experiments.many_runs.cases import RUN, about, row, studies, trained


def _study(folder, runs):
    return Study(
        folder=folder,
        queue=lambda found, assumed: runs,
        tiny=runs,
        parts=lambda found, folder: {"rows": f"{len(found.rows)} rows"},
    )


@pytest.fixture
def argv(bytes_of_two, tmp_path, monkeypatch):
    """Flags that make rows of a study on this text, in a folder."""
    # A mixture of bytes: what `--data` alone decides is BPE.
    monkeypatch.setattr(command, "DataConfig", lambda source: bytes_of_two)
    return ["--data", bytes_of_two.source, "--out", str(tmp_path), "--tiny"]


def test_a_command_trains_what_is_missing(
    argv, bytes_of_two, tmp_path, monkeypatch, capsys
):
    runs = [RUN, dataclasses.replace(RUN, seed=4, lr=1e-3)]
    study, commit = _study(tmp_path, runs), record.git_sha()
    monkeypatch.setattr(record, "git_sha", lambda: "dirty")  # once rows are added
    assert command.main(study, argv) == 0
    rows = Results(tmp_path / "results.jsonl").rows
    assert [row["seed"] for row in rows] == [3, 4]
    assert {row["git"] for row in rows} == {commit}
    assert command.main(study, argv) == 0
    other = dataclasses.replace(bytes_of_two, holdout=0.5)
    monkeypatch.setattr(command, "DataConfig", lambda source: other)
    assert command.main(study, argv) == 2
    err = capsys.readouterr().err
    assert "--data: must be the text of the runs that are compared" in err
    assert Results(tmp_path / "results.jsonl").rows == rows
    found = rows[0]
    assert found["steps"] == 8 and not found["diverged"]
    assert set(found["heldout"]["bf16"]) == {"all", "one", "two"}
    assert "own" not in found["heldout"]  # nothing is quantized


def test_rows_have_mean_losses_of_the_trainer(argv, bytes_of_two, corpus, tmp_path):
    assert command.main(_study(tmp_path, [RUN]), argv) == 0
    (row,) = Results(tmp_path / "results.jsonl").rows
    losses = np.reshape(trained(RUN, bytes_of_two, corpus), (2, 4)).mean(1)
    np.testing.assert_allclose(row["losses"], losses, rtol=1e-5)


@studies
def test_a_tiny_study_trains_and_shows(name, argv, tmp_path):
    assert command.main(about(name), argv) == 0
    rows = Results(tmp_path / "results.jsonl").rows
    assert [row["policy"] for row in rows] == [run.policy for run in about(name).tiny]
    assert set(rows[1]["heldout"]) == {"bf16", "own"}


@pytest.mark.parametrize(
    "flags, expected",
    [
        (["--only", "bf16", "ufp5"], "--only: must name policies of the study, bf16, "),
        (["--jobs", "0"], "--jobs: must be at least 1, got 0"),
        (["--limit", "nan"], "--limit: must be a positive number of seconds, got nan"),
    ],
)
def test_a_command_says_what_it_cannot_do(flags, expected, tmp_path, capsys):
    about = _study(tmp_path, [RUN])
    assert command.main(about, ["--dry", *flags]) == 2
    assert expected in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_to_is_said_before_training(
    argv, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(queue, "perform_all", None)
    (tmp_path / "file").touch()
    argv += ["--out", str(tmp_path / "file")]
    assert command.main(_study(tmp_path, [RUN]), argv) == 2
    assert "error: --out: must be a folder to write to" in capsys.readouterr().err


def test_a_new_folder_takes_figures(tmp_path):
    def draw(found, folder):
        (folder / "a.png").write_text("drawn")
        return {}

    about = dataclasses.replace(_study(tmp_path, [RUN]), parts=draw)
    assert command.main(about, ["--show", "--out", str(tmp_path / "new")]) == 0
    assert (tmp_path / "new" / "a.png").exists()


def test_an_interrupted_command_is_one_sentence(argv, tmp_path, monkeypatch, capsys):
    def interrupted(tasks, jobs):
        raise KeyboardInterrupt

    monkeypatch.setattr(queue, "perform_all", interrupted)
    assert command.main(_study(tmp_path, [RUN]), argv) == 130
    assert capsys.readouterr().err.startswith("interrupted: runs that had ended")


def test_a_command_that_lost_a_process_says_so(argv, tmp_path, monkeypatch):
    died = lambda prepare, tasks, **_: [ProcessDied("of a signal") for _ in tasks]
    monkeypatch.setattr(queue, "in_turn", died)
    assert command.main(_study(tmp_path, [RUN]), argv) == 1


def test_a_command_says_what_waits_for_learning_rates(
    argv, tmp_path, monkeypatch, capsys
):
    rate, other = RUN, dataclasses.replace(RUN, policy="ufp4")
    waits = dataclasses.replace(
        _study(tmp_path, []),
        queue=lambda found, assumed: [rate, other] if assumed else [rate],
    )
    monkeypatch.setattr(queue, "perform_all", lambda tasks, jobs: 0)  # no time left
    assert command.main(waits, argv[:-1]) == 0
    out = capsys.readouterr().out
    assert "Not done: 1 run. The same command goes on." in out
    assert "Waiting for learning rates, which bf16 is trained for: 1 run." in out
    only = command.Arguments(only=("ufp4",))
    command._say_what_waits(waits, only, Found([row(rate, diverged=1)]))
    said = "Without a learning rate: 1 run, as bf16 diverged at every rate"
    assert said in capsys.readouterr().out


def test_a_page_without_markers_is_one_sentence(tmp_path, capsys):
    about = _study(tmp_path / "studies" / "study", [RUN])
    about.folder.mkdir(parents=True)
    (about.folder / "README.md").write_text("no markers")
    assert command.main(about, ["--show"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: filled: the page must have '<!-- rows -->'")
    assert error.count("\n") == 1
