"""What the project promises outside its modules: the README and the metadata."""

import doctest
import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

import fp4jax
from fp4jax import policies

ROOT = Path(__file__).parent.parent
METADATA = tomllib.loads((ROOT / "pyproject.toml").read_text())
PROJECT, TOOLS = METADATA["project"], METADATA["tool"]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```$", README, flags=re.MULTILINE | re.DOTALL)


def test_first_two_code_blocks_are_the_whole_set_up():
    train, test = (code.strip() for _, code in BLOCKS[:2])
    assert train == "python -m pip install -e . && python -m experiments.pretrain"
    assert test == "python -m pip install -e '.[test]' && python -m pytest"


def test_examples_of_the_readme_are_true():
    examples = [code for language, code in BLOCKS if language == "python"]
    assert examples
    for code in examples:
        if ">>>" not in code:  # of a file
            exec(code, {})
            continue
        parsed = doctest.DocTestParser().get_doctest(code, {}, "README.md", None, 0)
        assert doctest.DocTestRunner().run(parsed).failed == 0


def test_readme_lists_every_policy():
    assert set(re.findall(r"^\| `(\w+)` \|", README, re.MULTILINE)) == set(
        policies.PRESETS
    )


def test_contributing_stays_short():
    assert len((ROOT / "CONTRIBUTING.md").read_text().splitlines()) <= 40


def test_version_has_one_source():
    assert PROJECT["dynamic"] == ["version"]
    assert TOOLS["hatch"]["version"]["path"] == "fp4jax/__init__.py"
    assert re.fullmatch(r"\d+\.\d+\.\d+", fp4jax.__version__)


def test_oldest_libraries_are_the_lower_bounds():
    extras = PROJECT["optional-dependencies"]
    others = [bound for bound in extras["test"] if bound != "fp4jax[data]"]
    bounds = [*PROJECT["dependencies"], *extras["data"], *others]
    lines = (ROOT / ".ci/oldest.txt").read_text().splitlines()
    pins = {pin.name: pin.specifier for pin in map(Requirement, lines)}
    for bound in map(Requirement, bounds):
        (lowest,), (pinned,) = bound.specifier, pins[bound.name]
        assert Version(lowest.version) == Version(pinned.version), bound


def test_type_checkers_find_the_annotations():
    assert (ROOT / "fp4jax/py.typed").read_text() == ""
