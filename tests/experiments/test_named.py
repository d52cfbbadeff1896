"""Policies out of a user's file, and one sentence for what is wrong with it."""

import dataclasses
import textwrap

import pytest

from experiments import named, plan, pretrain
from experiments.folder import read_log
from experiments.kernels import cases
from experiments.presets import of_batch, resolve
from experiments.saved import RunFolder
from fp4jax import models, policies, recipes
from fp4jax.policies import Policy, Rule

CONFIG = models.PRESETS["tiny"]
MINE = """
    from __future__ import annotations
    import dataclasses

    from fp4jax import recipes
    from fp4jax.policies import Policy, Rule
    from fp4jax.recipes import Recipe, bf16

    @dataclasses.dataclass
    class Options:
        block: int = 16

    def mixed(options: Options = Options()) -> Recipe:
        return dataclasses.replace(recipes.ufp4(), dgrad=recipes.nvfp4().dgrad)

    def first_kept(config):
        return Policy(mixed(), (Rule("blocks/0/*", bf16()),))

    def of_no_layer(config):
        return Policy(mixed(), (Rule("blocks/99/*", bf16()),))

    def a_name():
        return "ufp4"

    def failing(config):
        return config.no_such

    def leaving(config):
        raise SystemExit(3)

    value = mixed()
"""
MIXED = dataclasses.replace(recipes.ufp4(), dgrad=recipes.nvfp4().dgrad)


@pytest.fixture
def mine(tmp_path):
    """The path of a file with policies."""
    path = tmp_path / "mine.py"
    path.write_text(textwrap.dedent(MINE))
    return path


def test_published_policies_have_their_names():
    for name, preset in policies.PRESETS.items():
        assert named.policy(name) is preset


def test_a_function_returns_a_recipe_or_a_policy_of_the_model(mine):
    assert named.policy(f"{mine}:mixed")(CONFIG) == Policy(MIXED)
    kept = (Rule("blocks/0/*", recipes.bf16()),)
    assert named.policy(f"{mine}:first_kept")(CONFIG) == Policy(MIXED, kept)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            "mixt",
            "must define a function 'mixt', got a_name, failing, first_kept, leaving,",
        ),
        ("value", "must define a function 'value', got "),
        ("bf16", "must define a function 'bf16', got "),  # of another module
        ("a_name", "py:a_name: must return a Recipe or a Policy of fp4jax, got str."),
        ("failing", "it raised AttributeError in line 26: "),
        ("leaving", "it raised SystemExit in line 29: 3"),
        (
            "of_no_layer",
            "every rule must be the first to match some layer, got pattern=",
        ),
    ],
)
def test_what_a_function_does_wrong_is_said(mine, function, message):
    with pytest.raises(ValueError) as caught:
        named.policy(f"{mine}:{function}")(CONFIG)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "import jax\nimport no_such",
            "ModuleNotFoundError in line 2: No module named 'no_such'. What it imports "
            "must be in the current folder or in PYTHONPATH.",
        ),
        ("import sys\nsys.exit(4)", "it raised SystemExit in line 2: 4"),
        ("def f(:", "SyntaxError: invalid syntax"),
        ("", "must define a function 'f', got none at all"),
        (None, "must name a file that is there"),
    ],
)
def test_what_is_wrong_with_a_file_is_said(tmp_path, text, message):
    path = tmp_path / "wrong.py"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ValueError) as caught:
        named.policy(f"{path}:f")
    assert str(caught.value).startswith("--policies: ") and message in str(caught.value)


@pytest.mark.parametrize("name", ["ufp5", "ufp4:f", "mine.py"])
def test_another_name_lists_those_there_are(name):
    with pytest.raises(
        ValueError, match="must be one of bf16, .*, or FILE.py:FUNCTION"
    ):
        named.policy(name)


def test_two_names_of_one_folder_raise_before_anything_trains(mine, monkeypatch):
    monkeypatch.chdir(mine.parent)
    (mine.parent / "a").mkdir()
    for copy in ("a/b.py", "a-b.py"):
        (mine.parent / copy).write_text(mine.read_text())
    names = ["mine.py:mixed", "a/b.py:mixed"]
    assert resolve(policy_names=names).policies[1:3] == tuple(names)
    message = "got 'a/b.py:mixed' and 'a-b.py:mixed', both of which have 'a-b.py-mixed'"
    with pytest.raises(ValueError, match=message):
        resolve(policy_names=[*names, "a-b.py:mixed"])


def test_commands_take_a_function_of_a_file(mine, monkeypatch):
    monkeypatch.chdir(mine.parent)
    plan.check(plan.Arguments(policy="mine.py:mixed"), {})
    with pytest.raises(
        ValueError, match=r"--policy: must name a file .* 'my.py:mixed'"
    ):
        plan.check(plan.Arguments(policy="my.py:mixed"), {})
    packed = cases.policy_of("mine.py:mixed+packed", of_batch("tiny", 1, 32))
    assert packed == Policy(dataclasses.replace(MIXED, residuals="packed"))


def test_a_run_has_a_folder_of_its_name(mine, tmp_path):
    (tmp_path / "texts").mkdir()
    for i in range(9):
        (tmp_path / "texts" / f"{i}.txt").write_text(
            f"Text {i} counts to {i * i}. " * 9
        )
    sizes = ("num_layers=1", "d_model=32", "d_ff=32", "head_dim=16")
    flags = [f"--set=model.{size}" for size in sizes]
    flags += ["--set=data.sequence_length=32", "--set=data.vocab_size=257"]
    flags += ["--set=data.tokenizer=bytes", "--set=data.holdout=0.3"]
    name, out = f"{mine}:mixed", tmp_path / "out"
    flags += [f"--policies={name}", "--alone", "--steps=2", f"--out={out}"]
    assert pretrain.main([*flags, f"--data={tmp_path / 'texts'}"]) == 0
    (row,) = read_log(out / "trials.jsonl")
    (trial,) = RunFolder.of(out).trials
    assert row["policy"] == name
    assert trial.name == f"{named.file_name(name)}-0"
