import dataclasses

import pytest

from experiments import study
from experiments.ablation import grids
from tests.experiments.many_runs.cases import RUN, row


@pytest.fixture
def rows():
    """Rows of two seeds, but of none of E2M1 without a rotation."""
    losses = {
        "bf16": (2.0, 2.2),
        "ufp4_no_rht": (2.06, 2.266),
        "e2m1_ref": (2.06, 2.266),
        "ufp4_rht_wgrad": (2.06, 2.266),
        "e2m1_rht": (2.08, 2.288),
        "ufp4": (2.04, 2.244),
    }
    seeds = [dataclasses.replace(RUN, seed=seed) for seed in range(2)]
    return [
        row(dataclasses.replace(run, policy=policy), loss)
        for policy, of_seeds in losses.items()
        for run, loss in zip(seeds, of_seeds, strict=True)
    ]


def test_grids_are_compared_under_each_scope(rows):
    none, wgrad, everywhere, change = grids.table(rows).splitlines()[2:]
    assert none == "| none |  | +3.00% +- 0.00 |  |"
    assert wgrad.startswith("| wgrad | +3.00% +- 0.00 | +3.00% +- 0.00 |")
    assert everywhere.endswith("| -2.00 (-2.00 to -2.00), better |")
    assert (
        "| +1.00 (+1.00 to +1.00), worse | -1.00 (-1.00 to -1.00), better |" in change
    )


def test_every_seed_has_a_line_and_every_grid_one_of_means(rows, tmp_path, monkeypatch):
    drawn = []
    monkeypatch.setattr(study, "save", lambda figure, *_: drawn.append(figure))
    grids.draw([], tmp_path / "a.png")
    grids.draw(rows, tmp_path / "a.png")
    (axes,) = drawn[0].axes
    points = [line.get_xydata().round(6).tolist() for line in axes.lines]
    uniform = [[0, 3.0], [1, 3.0], [2, 2.0]]
    assert points == 3 * [[[1, 3.0], [2, 4.0]]] + 3 * [uniform]
