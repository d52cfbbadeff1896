"""The folder of results: who may write, what it keeps, and how it is rewound."""

import json
import math

import pytest

from experiments.folder import Folder, number, read_log

DESCRIPTION = {
    "command": "train",
    "corpus": "abc",
    "config": {
        "run": {"steps": 5},
        "data": {"source": "here", "tokenizer": "here/tokenizer.json", "workers": 0},
        "checkpoint": {"every": 1},
    },
    "policies": {"bf16": {"type": "Recipe"}},
}


def changed(**sections):
    return DESCRIPTION | {"config": DESCRIPTION["config"] | sections}


def test_one_command_at_a_time_has_it_open(tmp_path):
    with Folder(tmp_path / "run", DESCRIPTION, resume=False):
        with pytest.raises(ValueError, match="no other command writes to"):
            Folder(tmp_path / "run", DESCRIPTION, resume=True)
    with Folder(tmp_path / "run", DESCRIPTION, resume=True):
        pass


def test_it_is_not_written_to_twice_without_resume(tmp_path):
    Folder(tmp_path / "run", DESCRIPTION, resume=False).__exit__()
    with pytest.raises(ValueError, match="--out: must be a new or an empty folder"):
        Folder(tmp_path / "run", DESCRIPTION, resume=False)


def test_all_processes_share_it(tmp_path, monkeypatch):
    monkeypatch.setattr("jax.process_index", lambda: 1)  # which makes no folder
    with pytest.raises(ValueError, match="a folder that all processes share, got"):
        Folder(tmp_path / "run", DESCRIPTION, resume=False)


def test_another_configuration_is_refused_with_the_fields_that_differ(tmp_path):
    Folder(tmp_path, DESCRIPTION, resume=True).__exit__()
    other = changed(run={"steps": 6}) | {"corpus": "abd"}
    message = r'which has config\.run\.steps=5, not 6; corpus="abc", not "abd"\. Use'
    with pytest.raises(ValueError, match=message):
        Folder(tmp_path, other, resume=True)


def test_what_is_kept_may_change(tmp_path):
    Folder(tmp_path, DESCRIPTION, resume=True).__exit__()
    moved = {"source": "there", "tokenizer": "there/tokenizer.json", "workers": 2}
    other = changed(checkpoint={"every": 7}, data=moved) | {"command": "again"}
    Folder(tmp_path, other, resume=True).__exit__()


def test_a_line_that_was_cut_off_is_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with Folder(tmp_path, DESCRIPTION, resume=True) as folder:
        folder.write("metrics.jsonl", {"policy": "bf16", "seed": 0, "step": 1})
    with path.open("a") as file:
        file.write('{"policy": "bf1')
    with Folder(tmp_path, DESCRIPTION, resume=True) as folder:
        assert [r["step"] for r in folder.rows("metrics.jsonl", "bf16", 0)] == [1]
        folder.write("metrics.jsonl", {"policy": "bf16", "seed": 0, "step": 2})
    steps = [json.loads(line)["step"] for line in path.read_text().splitlines()]
    assert steps == [1, 2]


def test_a_damaged_line_is_an_error_that_names_it(tmp_path):
    (tmp_path / "trials.jsonl").write_bytes(b'{"policy": "bf16"}\n\0\0\xff\n{}\n')
    with pytest.raises(ValueError, match=r"line 2 of '.*trials\.jsonl' must be a JSON"):
        read_log(tmp_path / "trials.jsonl")


@pytest.mark.parametrize("text", ["", "{}", "[]", "null", '{"config": 3}', "\0"])
def test_a_damaged_configuration_is_an_error_that_names_it(tmp_path, text):
    Folder(tmp_path, DESCRIPTION, resume=True).__exit__()
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ValueError, match=r"config\.json' must be the configuration"):
        Folder(tmp_path, DESCRIPTION, resume=True)


def test_rewinding_a_trial_leaves_the_others(tmp_path):
    with Folder(tmp_path, DESCRIPTION, resume=True) as folder:
        for policy in ("bf16", "ufp4"):
            for step in (1, 2, 3):
                row = {"policy": policy, "seed": 0, "step": step}
                folder.write("metrics.jsonl", row)
        folder.rewind("ufp4", 0, step=1)
        folder.write("metrics.jsonl", {"policy": "ufp4", "seed": 0, "step": 2})
        assert [r["step"] for r in folder.rows("metrics.jsonl", "bf16", 0)] == [1, 2, 3]
        assert [r["step"] for r in folder.rows("metrics.jsonl", "ufp4", 0)] == [1, 2]


def test_a_finished_trial_is_kept(tmp_path):
    row = {"policy": "bf16", "seed": 1, "heldout_loss": 2.5, "failed_checkpoints": 2}
    with Folder(tmp_path, DESCRIPTION, resume=True) as folder:
        assert folder.finished("bf16", 1) is None
        folder.finish(row)
    with Folder(tmp_path, DESCRIPTION, resume=True) as folder:
        assert folder.finished("bf16", 1) == row
        assert folder.finished("bf16", 0) is None
        assert folder.failed_checkpoints == 2


def test_null_is_nan():
    assert math.isnan(number(None)) and number(1.5) == 1.5
