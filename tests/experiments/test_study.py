"""Rows of a study, and the page that is made of them."""

import fcntl
import json
import os
import threading

import pytest
from matplotlib.figure import Figure

from experiments import study
from experiments.study import Results

PIECES = [{"policy": name, "seed": seed} for name in "ab" for seed in (0, 1)]


def test_what_is_there_is_not_measured_again(tmp_path):
    path = tmp_path / "made" / "results.jsonl"
    results = Results(path)
    for piece in results.missing(PIECES[:3]):
        results.add(piece | {"loss": 1.0})
    again = Results(path)
    assert list(again.missing(PIECES)) == PIECES[3:]
    assert [row["seed"] for row in again.find(policy="a")] == [0, 1]


def test_rows_say_where_they_come_from_unless_they_name_it(tmp_path):
    results = Results(tmp_path / "results.jsonl")
    results.add({"seed": 0})
    results.add({"seed": 1, "device": "NVIDIA H200"})
    devices = [row["device"] for row in results.rows]
    assert devices == ["cpu", "NVIDIA H200"]
    assert all({"git", "jax"} <= row.keys() for row in results.rows)


def test_a_row_that_was_cut_off_is_measured_again(tmp_path):
    path = tmp_path / "results.jsonl"
    path.write_text('{"seed": 0}\n{"seed": 1, "lo')
    results = Results(path)
    assert list(results.missing([{"seed": 1}])) == [{"seed": 1}]
    results.add({"seed": 1})
    lines = path.read_text().splitlines()
    assert [json.loads(line)["seed"] for line in lines] == [0, 1]


def test_a_row_follows_one_that_another_process_did_not_finish(tmp_path):
    results = Results(tmp_path / "results.jsonl")
    results.add({"seed": 0})
    with open(results.path, "a") as file:  # until its disk was full
        file.write('{"seed": 1, "lo')
    results.add({"seed": 2})
    assert [row["seed"] for row in Results(results.path).rows] == [0, 2]


def test_a_page_keeps_what_is_around_its_parts(tmp_path):
    page = tmp_path / "README.md"
    page.write_text("# A\n<!-- t -->\n<!-- end of t -->\nB \\1\n")
    study.show(page, {"t": "\\1 | new\n"})
    assert page.read_text() == "# A\n<!-- t -->\n\\1 | new\n<!-- end of t -->\nB \\1\n"
    study.show(page, {"t": "newer"})
    assert "\nnewer\n" in page.read_text() and "new\n" not in page.read_text()


def test_rows_that_are_whole_are_not_written_again(tmp_path):
    path = tmp_path / "results.jsonl"
    path.write_text('{"seed": 0}\n')
    os.utime(path, (0, 0))
    assert Results(path).rows == [{"seed": 0}]
    assert path.stat().st_mtime == 0


def test_a_page_stays_where_the_disk_is_full(tmp_path, monkeypatch):
    page, text = tmp_path / "README.md", "# A\n<!-- t -->\n<!-- end of t -->\n"
    page.write_text(text)

    def full(path, text, encoding):
        path.write_bytes(text[:4].encode())
        raise OSError("No space left on device")

    monkeypatch.setattr(type(page), "write_text", full)
    with pytest.raises(OSError, match="No space left"):
        study.show(page, {"t": "new"})
    assert page.read_text() == text


@pytest.mark.parametrize(
    "page", ["", "<!-- t -->\n", 2 * "<!-- t -->\n<!-- end of t -->"]
)
def test_a_page_without_the_markers_of_a_part_raises(page):
    with pytest.raises(ValueError, match="around a part, once, got"):
        study.filled(page, {"t": "new"})


def test_figure_is_written_with_the_legend_of_its_labels(tmp_path):
    figure = Figure()
    plain, labelled = figure.subplots(1, 2)
    labelled.plot([1, 2], label="e2m1_ref")
    study.save(figure, tmp_path / "figure.png", plain, labelled)
    assert (tmp_path / "figure.png").stat().st_size > 1000
    assert labelled.get_legend() is not None and plain.get_legend() is None


def test_processes_that_add_rows_wait_for_each_other(tmp_path):
    path = tmp_path / "results.jsonl"
    results = Results(path)
    results.add({"seed": 0})
    added = threading.Thread(target=results.add, args=({"seed": 1},))
    with open(path, "ab", buffering=0) as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        other.write(b'{"seed": 2')  # half of a row, which nobody may cut off
        added.start()
        added.join(0.2)
        assert added.is_alive()
        other.write(b"}\n")
    added.join(20)
    assert [row["seed"] for row in Results(path).rows] == [0, 2, 1]
