"""1-D blocks beside squares: a hand example, a small run, and tables of known rows."""

import jax.numpy as jnp
import numpy as np
import pytest

from experiments import study
from experiments.folder import read_log
from experiments.operands import command
from experiments.operands.__main__ import STUDY as OPERANDS
from experiments.operands.captures import Capture, Source
from experiments.operands.tiles import Tiles
from experiments.transposition import measure, show
from experiments.transposition.__main__ import STUDY
from fp4jax import Operands
from fp4jax.numerics import UNIFORM, Quantizer
from tests.experiments.operands.test_study import synthetic

# Rows have scales 1 and 2, columns 1 and 2 too, the square 2.
MATRIX = jnp.array([[7.0, 1.0], [7.0, 14.0]])
HAND = Operands(MATRIX, MATRIX, MATRIX)


@pytest.fixture(scope="module")
def found():
    tiles = Tiles(Capture(step=1, loss=0.0, layers={"blocks/0/mlp/up": HAND}))
    return measure.measure(tiles, Quantizer(UNIFORM, block=2))


def test_mismatch_and_cost_by_hand(found):
    x = found["tensors"]["x"]
    # Scales differ at 1 and at the lower 7, by an octave; there 7 becomes 8 in rows.
    assert x["scale differs"] == [50] and x["octaves"] == [0.5]
    assert x["value differs"] == [50]
    # Columns make 1 of 1 with scale 2: 0 or 2, half to even 0.
    views = 100 * np.sqrt((1 + 1) / (49 + 1 + 49 + 196))
    assert x["views"][0] == pytest.approx(views, abs=1e-3)
    assert x["rows"] == x["columns"] == [round(10 * np.log10(295), 3)]
    # The square has scale 2: 7, 1, 7, 14 become 8, 0, 8, 14.
    assert x["squares"] == [round(10 * np.log10(295 / 3), 3)]


def test_errors_of_gradients_by_hand(found):
    a = np.asarray(MATRIX)
    rows, squares = np.array([[7, 1], [8, 14]]), np.array([[8, 0], [8, 14]])
    columns = np.array([[7, 0], [7, 14]])

    def error(exact, rounded):
        return 100 * np.linalg.norm(rounded - exact) / np.linalg.norm(exact)

    products, gradients = found["products"], found["gradients"]
    expected = {
        "y": error(a @ a, rows @ columns),
        "dx": error(a @ a.T, rows @ rows.T),
        "dw": error(a.T @ a, columns.T @ columns),
    }
    for name, value in expected.items():
        assert products["1-D"][name][0] == pytest.approx(value, abs=2e-3)
    square = error(a @ squares.T, squares @ squares.T)
    assert gradients["2-D"]["dx"][0] == pytest.approx(square, abs=2e-3)
    one = error(a @ columns.T, rows @ rows.T)
    assert gradients["1-D"]["dx"][0] == pytest.approx(one, abs=2e-3)
    weight = error(rows.T @ a, columns.T @ columns)
    assert gradients["1-D"]["dw"][0] == pytest.approx(weight, abs=2e-3)


def known(grid):
    """A row of two layers in which squares cost 2 dB and halve one layer's error."""
    tensor = {"rows": [20, 21], "columns": [20, 21], "squares": [18, 19]}
    tensor |= {"scale differs": [80, 90], "octaves": [0.5, 0.5]}
    tensor |= {"value differs": [70, 70], "views": [10, 12]}
    errors = {
        "1-D": {"y": [8, 8], "dx": [8, 8], "dw": [8, 8]},
        "2-D": {"y": [4, 9], "dx": [4, 9], "dw": [4, 9]},
    }
    row = {"step": 8, "grid": grid, "scale": "F32", "block": 32}
    tensors = {name: tensor for name in ("x", "w", "dy")}
    return row | {"tensors": tensors, "products": errors, "gradients": errors}


def test_tables_of_known_rows(tmp_path):
    rows = [known("E2M1"), known("UNIFORM")]
    cells = "85.00 +- 5.00 | 0.50 +- 0.00 | 70.00 +- 0.00 | 11.00 +- 1.00"
    assert show.mismatch(rows).splitlines()[2] == f"| F32 | 32 | {cells} | {cells} |"
    assert (
        show.cost(rows)
        .splitlines()[2]
        .startswith("| F32 | 32 | 20.50, -2.00 +- 0.00 |")
    )
    assert show.gradients(rows).splitlines()[2] == (
        f"| F32 | 32 | E2M1 |{4 * ' 8.00 to 6.50 (1 of 2) |'}"
    )
    assert (
        show.steps(rows)
        .splitlines()[2]
        .startswith("| F32 | E2M1 | 8 | -2.00 +- 0.00 | -1.50 +- 2.50 |")
    )
    show.plot(rows, tmp_path / "blocks.png")
    assert (tmp_path / "blocks.png").stat().st_size > 10_000


def test_rows_that_two_commands_measured_count_once(tmp_path, capsys):
    results = study.Results(tmp_path / "results.jsonl")
    for commit in ("a", "a-dirty"):
        for grid in ("E2M1", "UNIFORM"):
            results.add(known(grid) | {"git": commit})
    command.main(STUDY, command.Arguments(out=tmp_path, show=True))
    once = show.parts([known("E2M1"), known("UNIFORM")])
    assert capsys.readouterr().out == "\n\n".join(once.values()) + "\n"


def test_rows_are_of_one_run_which_they_name(tmp_path, monkeypatch):
    synthetic(tmp_path)  # of a loss of 7
    monkeypatch.setattr(measure, "measure", lambda tiles, quantizer: {})
    case = {"grid": "E2M1", "scale": "F32", "block": 32}
    monkeypatch.setattr(measure, "cases", lambda blocks: [case])
    results = study.Results(tmp_path / "results.jsonl")
    source = Source.of(tmp_path, tiny=True)
    command.measure_all(STUDY, source, results, tiny=True)
    assert [(row["step"], row["loss"]) for row in results.rows] == [(1, 7.0), (2, 7.0)]
    results.add({"step": 2, "loss": 6.0})
    case["block"] = 8
    with pytest.raises(ValueError, match="at step 2 is 7.0, got rows of 6.0"):
        command.measure_all(STUDY, source, results, tiny=True)


def test_the_rows_are_of_the_run_of_operands():
    operands = read_log(OPERANDS.folder / "results.jsonl")
    losses = {
        row["step"]: row["loss"] for row in operands if row["section"] == "captures"
    }
    for row in read_log(STUDY.folder / "results.jsonl"):
        assert row["loss"] == losses[row["step"]]


def test_the_readme_has_the_tables_of_the_rows():
    rows = read_log(STUDY.folder / "results.jsonl")
    page = (STUDY.folder / "README.md").read_text("utf-8")
    assert study.filled(page, show.parts(rows)) == page
