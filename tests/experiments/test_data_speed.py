"""The line that is printed is the line that is kept, and counts what was drawn."""

import json

import pytest

from experiments import data_speed

SMALL = ["--tokens", "30000", "--sequence-length", "64", "--seconds", "0.1"]


def test_one_line_is_printed_and_kept(tmp_path, capsys):
    out = tmp_path / "deep" / "speed.jsonl"
    for count in (1, 2):
        assert data_speed.main([*SMALL, "--out", str(out)]) == 0
        printed = capsys.readouterr().out
        lines = out.read_text().splitlines(keepends=True)
        assert len(lines) == count and lines[-1] == printed
    found = json.loads(printed)
    assert found["batches"] > 0 and found["domains"] == 2
    drawn = found["batches"] * found["batch_size"] * found["sequence_length"]
    assert found["tokens_per_s"] <= drawn / 0.1
    assert 29_000 < found["train_tokens"] < 36_000


@pytest.mark.parametrize("name", ["nowhere", "empty"])
def test_a_folder_without_tokens_is_one_error(tmp_path, capsys, name):
    (tmp_path / "empty").mkdir()
    out = tmp_path / "speed.jsonl"
    given = ["--data", str(tmp_path / name), "--out", str(out)]
    assert data_speed.main(given) == 2
    assert capsys.readouterr().err.startswith("error: ")
    assert not out.exists()
