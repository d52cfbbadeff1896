"""Every notebook runs, is paired with its script, and holds no outputs."""

from pathlib import Path

import jupytext
import matplotlib
import pytest

COLAB = Path(__file__).parent.parent / "colab"
notebooks = pytest.mark.parametrize(
    "path", sorted(COLAB.glob("*.ipynb")), ids=lambda path: path.stem
)


@notebooks
def test_runs_with_its_tiny_parameter(path):
    matplotlib.use("Agg", force=True)
    cells = [
        cell.source for cell in jupytext.read(path).cells if cell.cell_type == "code"
    ]
    code = "\n\n".join(cells)
    assert code.count("tiny = False") == 1
    exec(compile(code.replace("tiny = False", "tiny = True"), path, "exec"), {})


@notebooks
def test_is_paired_with_its_script(path):
    pair = jupytext.read(path), jupytext.read(path.with_suffix(".py"))
    notebook, script = (
        [(cell.cell_type, cell.source) for cell in each.cells] for each in pair
    )
    assert notebook == script


@notebooks
def test_holds_no_outputs(path):
    for cell in jupytext.read(path).cells:
        assert not cell.get("outputs") and cell.get("execution_count") is None
