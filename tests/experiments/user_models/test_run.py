"""What the study reports of runs, diverged ones too."""

import json
import math

import pytest

from experiments.user_models import run
from fp4jax import policies


def row(recipe, losses, **others):
    return dict(library="nnx", model="vit", recipe=recipe, losses=losses, **others)


def test_a_diverged_run_is_reported(tmp_path):
    plain, found = row(None, [3.0, 2.0]), row("ufp4", [3.0, math.nan], equal=True)
    rows = run.judged([plain, found])
    assert [run.is_good(row) for row in rows] == [True, False]
    assert "nan (!)" in run.table(rows)
    for _ in range(2):  # a file of its own each time
        run.write(tmp_path / "results.jsonl", [{"steps": 2}, *rows])
    text = (tmp_path / "results.jsonl").read_text()
    setting, *read = map(json.loads, text.splitlines())
    assert setting == {"steps": 2}
    assert [row["losses"] for row in read] == [[3.0, 2.0], [3.0, None]]


@pytest.mark.parametrize("steps", ["1", "0", "-3"])
def test_a_run_of_one_step_shows_nothing(steps, capsys):
    with pytest.raises(SystemExit, match="2"):
        run.main(["--steps", steps])
    assert f"shows no update, got {steps}\n" in capsys.readouterr().err


def test_every_quantizing_recipe_is_trained():
    assert set(run.RECIPES) == set(policies.PRESETS) - {"bf16"}
