import numpy as np
import pytest

from experiments import study
from experiments.many_runs import figure


@pytest.mark.parametrize("count", [2, 6])
def test_curves_are_means_of_the_last_losses(count):
    rows = [{"policy": "bf16", "losses": [1.0] * count}] * 2
    curve = figure.curves(rows)["bf16"]
    np.testing.assert_allclose(curve.values, 1.0)
    assert curve.ends.tolist() == list(range(min(count, 5), count + 1))


def test_the_legend_is_in_the_order_of_the_last_gap(monkeypatch, tmp_path):
    shape = {"at_once": 1, "rows": 1, "length": 1}
    last = {"bf16": 1.0, "ufp4": 1.01, "mxfp4": 1.03, "ti2d": None}
    rows = [
        {"policy": policy, "losses": [2.0] * 9 + [value]} | shape
        for policy, value in last.items()
    ]
    drawn = []
    monkeypatch.setattr(study, "save", lambda made, *_: drawn.append(made))
    policies = ("bf16", "nvfp4", *list(last)[1:])
    figure.draw(rows, tmp_path / "a.png", policies=policies)
    (legend,), (losses, gaps) = drawn[0].legends, drawn[0].axes
    names = [text.get_text() for text in legend.get_texts()]
    assert names == ["ti2d", "mxfp4", "ufp4", "bf16"]
    colors = [f"C{policies.index(name)}" for name in names]
    assert [line.get_color() for line in legend.get_lines()] == colors
    assert [line.get_color() for line in losses.lines] == colors[::-1]
    assert [line.get_color() for line in gaps.lines] == [*colors[-2::-1], "black"]
