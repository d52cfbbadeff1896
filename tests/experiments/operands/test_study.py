"""The study on a small capture, and its tables from rows that are known."""

import json

import jax
import numpy as np
import pytest

from experiments import study
from experiments.folder import read_log
from experiments.operands import captures, cases, command, show
from experiments.operands.__main__ import STUDY
from experiments.operands.captures import TINY, Source
from experiments.operands.found import OPERANDS, PRODUCTS, Found

LAYERS = ["blocks/0/mlp/down", "blocks/1/mlp/down"]


def known_rows():
    """Rows in which a rotation costs E2M1 1 and 3 dB, and gains UNIFORM 2 dB."""
    rows = [{"section": "captures", "step": 8, "layers": LAYERS}]
    for grid in cases.GRIDS:
        for rotation in (0, 16):
            figures: dict = {}
            change = {"E2M1": [-1, -3], "UNIFORM": [2, 2]}.get(grid, [0, 0])
            qsnr = [20 + bool(rotation) * each for each in change]
            for gemm, name in OPERANDS:
                of = {"qsnr": qsnr, "alpha - 1": [0.5, -0.5], "b_eff": [0.5, 1.0]}
                of |= {"crest": [2.0, 3.0], "kurtosis": [3.0, 4.0]}
                figures.setdefault(gemm, {})[name] = of
            for gemm, name in PRODUCTS:
                figures[gemm][name] = {"qsnr": qsnr, "eta - 1": [-1.0, None]}
            for section in ("quantizers", "distributions"):
                row = {"section": section, "step": 8, "figures": figures}
                rows.append(row | cases.case(grid, rotation))
    return rows


def test_tables_of_known_rows():
    found = Found(known_rows())
    line = show.rotation(found).splitlines()[2]
    cells = [
        *("fprop x", "2.50 to 2.50", "3.50 to 3.50", "20.00 +- 0.00"),
        *(
            "-2.00 +- 1.00 (0 of 2 rise)",
            "20.00 +- 0.00",
            "+2.00 +- 0.00 (2 of 2 rise)",
        ),
        *("0 to 2", "2"),
    ]
    assert line == f"| {' | '.join(cells)} |"
    assert (
        show.matrices(found).splitlines()[2].startswith("| mlp/down | 2.50 +- 0.50 |")
    )
    # Crests of 2 and 3, six operands of each.
    assert [line.split(" | ")[1:] for line in show.crests(found).splitlines()[2:]] == [
        ["6", "-1.00 +- 0.00", "+2.00 +- 0.00", "6", "6", "0 to 6 |"],
        ["6", "-3.00 +- 0.00", "+2.00 +- 0.00", "6", "6", "0 to 6 |"],
    ]
    assert show.steps(found).splitlines()[2] == (
        "| fprop x | -2.00 +- 1.00 | +2.00 +- 0.00 |"
    )
    assert "nan" in show.products(found)  # a figure that is not finite stays seen
    assert show.scales(found).count("\n") == 2  # no line of what was not measured
    assert "| UNIFORM x, w, RHT 16 | UNIFORM dy, none |" in show.scales(found)


def test_the_readme_has_the_tables_of_the_rows():
    rows = read_log(STUDY.folder / "results.jsonl")
    page = (STUDY.folder / "README.md").read_text("utf-8")
    assert study.filled(page, show.parts(rows)) == page


def test_what_was_not_measured_is_named():
    with pytest.raises(ValueError, match="must be measured, got .*'rotation': 128"):
        Found(known_rows()).of(("fprop", "x"), "qsnr", grid="E2M1", rotation=128)


def synthetic(folder):
    """Captures of the tiny run, of random numbers."""
    for step in TINY.steps:
        path = Source(folder=folder).path(step)
        path.parent.mkdir(parents=True, exist_ok=True)
        arrays = {"loss": np.float32(7)}
        for i, (layer, name) in enumerate(
            (a, b) for a in LAYERS for b in ("x", "w", "dy")
        ):
            x = jax.random.normal(jax.random.key(i), (32, 32), "bfloat16")
            arrays[f"{layer}/{name}"] = np.asarray(x)
        np.savez(path, **arrays)


def test_goes_on_where_it_was_stopped_and_shows(tmp_path, monkeypatch, capsys):
    chosen = [case for case in cases.few_cases() if case["grid"] != "E2M1_TO_2"]
    monkeypatch.setattr(cases, "few_cases", lambda: chosen)
    monkeypatch.setattr(show, "GRIDS", ("E2M1", "UNIFORM"))
    synthetic(tmp_path)
    arguments = command.Arguments(run=tmp_path, out=tmp_path, tiny=True)
    command.main(STUDY, arguments)
    path = tmp_path / "results.jsonl"
    lines = path.read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    assert [row["step"] for row in rows] == [1] * 7 + [2] * 7
    # Of Gaussian numbers 21.4 and 20.5 dB.
    qsnr = [Found(rows).of(("fprop", "x"), "qsnr", grid=grid) for grid in cases.BOTH]
    assert (qsnr[0] < 20.9).all() and (qsnr[1] > 21).all()
    assert "| wgrad dy |" in capsys.readouterr().out
    figures = ("depth.png", "shrinkage.png", "change.png")
    assert all((tmp_path / name).stat().st_size > 10_000 for name in figures)

    path.write_text("\n".join(lines[:-1]) + '\n{"section": "quanti')
    command.main(STUDY, arguments)
    assert path.read_text().splitlines() == lines


def test_rows_of_another_run_are_not_added_to(tmp_path):
    synthetic(tmp_path)  # of a loss of 7
    about = {"model": TINY.model, "seed": 0, "tokens": TINY.tokens}
    row = {"section": "captures", "step": TINY.steps[0], "loss": 6.0} | about
    study.Results(tmp_path / "results.jsonl").add(row)
    with pytest.raises(ValueError, match="at step 1 is 7.0, got rows of 6.0"):
        command.main(STUDY, command.Arguments(run=tmp_path, out=tmp_path, tiny=True))


def test_nothing_is_shown_of_no_rows(tmp_path):
    with pytest.raises(ValueError, match="must have rows, got none. Measure first"):
        command.main(STUDY, command.Arguments(out=tmp_path, show=True))


def test_a_run_that_cannot_be_made_ends_with_what_it_said(tmp_path, capsys):
    (tmp_path / "something").touch()
    with pytest.raises(SystemExit, match="2"):
        captures.train(captures.dataclasses.replace(TINY, folder=tmp_path))
    assert "must be a new or an empty folder" in capsys.readouterr().err


def test_a_capture_is_of_the_step_that_training_took(tmp_path):
    source = captures.dataclasses.replace(TINY, folder=tmp_path)
    captures.train(source)
    found = captures.capture(source, 1)
    log = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert found.loss == json.loads(log[1])["loss"]
    assert len(found.layers) == 14
    again = captures.capture(source, 1)
    jax.tree.map(np.testing.assert_array_equal, found.layers, again.layers)
    up = found.layers["blocks/0/mlp/up"]
    assert (up.x.shape, up.w.shape, up.dy.shape) == ((64, 64), (64, 64), (64, 64))
