"""The folder of a run: made whole, or refused with a reason."""

import json

import pytest

from experiments import record


@pytest.mark.parametrize("name", ["new/folder", "."])
def test_config_is_written_into_a_new_or_an_empty_folder(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path.__class__(name)
    record.check_free(folder)
    record.create(folder, {"steps": 3})
    assert json.loads((tmp_path / name / "config.json").read_text()) == {"steps": 3}
    assert [path.name for path in folder.iterdir() if path.is_file()] == ["config.json"]


def test_a_file_in_the_way_is_named(tmp_path):
    file = tmp_path / "file"
    file.write_text("text")
    with pytest.raises(ValueError, match="--out: must be .* empty folder.* is a file"):
        record.check_free(file)
    with pytest.raises(ValueError, match="--out: must be a folder that can be made"):
        record.create(file / "below", {})


def test_what_json_lacks_leaves_no_folder(tmp_path):
    with pytest.raises(ValueError, match="JSON"):
        record.create(tmp_path / "run", {"lr": float("inf")})
    assert not list(tmp_path.iterdir())


def test_a_file_is_whole_where_two_processes_write_it(tmp_path, monkeypatch):
    path = tmp_path / "page"
    with record.whole(path) as ours:
        ours.write_text("ours")
        with monkeypatch.context() as patch:
            patch.setattr(record.os, "getpid", lambda: 1)
            with record.whole(path) as theirs:
                theirs.write_text("theirs")
    assert path.read_text() == "ours"
    with pytest.raises(OSError, match="full"), record.whole(path) as partial:
        partial.write_text("ha")
        raise OSError("full")
    assert [file.name for file in tmp_path.iterdir()] == ["page"]
    assert path.read_text() == "ours"
