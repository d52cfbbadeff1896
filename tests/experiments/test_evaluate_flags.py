"""Flags of evaluations that have an effect, and those that have none."""

import pytest

from experiments.evaluate_flags import Arguments


@pytest.fixture
def tokenized(tmp_path):
    (tmp_path / "index.json").touch()
    return str(tmp_path)


@pytest.mark.parametrize(
    "flags",
    [
        {},
        {"data": "a.jsonl", "text_field": "body"},
        {"loss": False, "sample": ("a",), "seed": 3, "top_k": 4},
        {"loss": False, "choices": "a"},
    ],
    ids=str,
)
def test_flags_that_go_together(flags):
    Arguments(checkpoint="run", **flags).check()


def test_tokens_have_no_fields(tokenized):
    Arguments(checkpoint="run", data=tokenized).check()
    flags = Arguments(checkpoint="run", data=tokenized, text_field="body")
    with pytest.raises(ValueError, match="must not come with --data that is tokenized"):
        flags.check()
