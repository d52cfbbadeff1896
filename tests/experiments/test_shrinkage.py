"""The study of shrinkage on small arrays: its figures, files and verdict."""

import dataclasses
import json

import numpy as np
import pytest

from experiments.shrinkage import __main__ as command
from experiments.shrinkage import cases, inputs, show, study


@pytest.fixture
def few(monkeypatch):
    """One or two cases of every section."""
    for name in ("data_cases", "scale_cases", "view_cases", "gemm_cases"):
        chosen = getattr(cases, name)()[:2]
        monkeypatch.setattr(cases, name, lambda chosen=chosen: chosen)


def test_tiny_run_writes_rows_figure_and_verdict(few, tmp_path, capsys):
    out = tmp_path / "results"
    command.main(tiny=True, out=out)
    lines = (out / "results.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    sections = ["data", "data", "scales", "scales", "views", "views", "gemm", "gemm"]
    assert [row["section"] for row in rows] == sections
    gauss = rows[0]
    # What 262144 elements leave of the tolerance.
    assert gauss["figures"]["alpha - 1"] == pytest.approx(-0.40, abs=0.1)
    assert gauss["figures"]["QSNR"] == pytest.approx(20.52, abs=0.05)
    assert len(gauss["bin_error"]) == 8 and gauss["bin_error"][7] > 0.2
    assert (out / "shrinkage.png").stat().st_size > 10_000
    assert json.loads((out / "config.json").read_text())["seed"] == 0
    printed = capsys.readouterr().out
    assert "Distributions" in printed and "figures as expected" in printed


def test_what_is_beyond_its_tolerance_is_named():
    case = cases.gemm_cases()[0]
    row = study.Row(case=case, figures={"eta - 1": -0.97, "output error": 0.2})
    assert list(row.off) == ["output error"]
    assert show.verdict([row]).splitlines() == [
        "1 of 2 figures as expected.",
        "gauss, E4M3, 16, E2M1: output error by +0.066",
    ]
    better = dataclasses.replace(row, figures={"eta - 1": -0.8, "output error": 0.134})
    assert show.verdict([better]) == "2 of 2 figures as expected."


def test_every_expected_figure_is_measured_and_has_a_tolerance():
    every = (
        cases.data_cases()
        + cases.scale_cases()
        + cases.view_cases()
        + cases.gemm_cases()
    )
    assert all(set(case.expected) <= set(cases.TOLERANCE) for case in every)
    assert len({(c.section, c.data, c.label, c.grid) for c in every}) == len(every)


def test_distributions_are_what_they_are_called():
    drawn = {
        name: inputs.draw(name, (512, 1024), seed=0) for name in inputs.DISTRIBUTIONS
    }
    assert all(x.dtype == np.float32 for x in drawn.values())
    std = drawn["channels"].std(0)
    assert (std[::64] > 15).all() and (np.delete(std, np.s_[::64]) < 2).all()
    assert 0.004 < (np.abs(drawn["spikes"]) > 6).mean() < 0.005
    np.testing.assert_array_equal(
        drawn["laplace"], inputs.draw("laplace", (512, 1024), seed=0)
    )
