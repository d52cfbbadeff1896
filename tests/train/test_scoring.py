"""Which choice is taken for the most probable one, and by what likelihoods."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from fp4jax import policies
from fp4jax.data.tokenizers import ByteTokenizer
from fp4jax.models import Transformer
from fp4jax.train import make_state
from fp4jax.train.scoring import (
    Accuracy,
    Question,
    answer,
    make_log_likelihoods,
    read_questions,
)
from tests.cases import SMALL

BYTES = ByteTokenizer(SMALL.vocab_size)
ROWS = {"tokenizer": BYTES, "sequence_length": 8, "batch_size": 3}


def by_length(state, batch):
    """Likelihoods of a model that charges 2 for the first token and 1 for others."""
    del state
    return -np.where(batch["loss_mask"].any(-1), 1 + batch["loss_mask"].sum(-1), 0)


@pytest.fixture(scope="module")
def model():
    return Transformer(SMALL, policies.bf16(SMALL), rngs=nnx.Rngs(0))


@pytest.fixture(scope="module")
def run(model):
    return make_state(model, optax.sgd(0.1))


def test_sum_favors_what_is_short_and_byte_what_is_long():
    questions = [Question("a", ("b", "bcd"), 0), Question("a", ("bcd", "b"), 0)]
    found = answer(by_length, None, questions, **ROWS)
    assert found == Accuracy(by_sum=0.5, by_byte=0.5, questions=2)
    first = answer(by_length, None, questions[:1], **ROWS)
    assert first == Accuracy(by_sum=1.0, by_byte=0.0, questions=1)


def test_bytes_are_those_of_utf8():
    words = Question("a", ("xx", "é"), 0)  # two bytes each: a tie, which goes first
    assert answer(by_length, None, [words], **ROWS).by_byte == 1


def test_likelihoods_are_those_of_the_choice_after_its_context(run, model):
    rows = []

    def recorded(state, batch):
        found = make_log_likelihoods(run[0])(state, batch)
        rows.extend(np.asarray(found))
        return found

    question = Question("01", ("23", "456"), 0)  # bytes that the model has
    answer(recorded, run[1], [question], **ROWS)
    for found, choice in zip(rows, question.choices, strict=False):
        (tokens,) = BYTES.encode([question.context + choice])
        logits = model(jnp.asarray(tokens, jnp.int32)[None])[0]
        log_p = jax.nn.log_softmax(logits)[np.arange(len(tokens) - 1), tokens[1:]]
        # A sum of other shape rounds otherwise: bfloat16 in each of few layers.
        np.testing.assert_allclose(found, log_p[1:].sum(), rtol=2**-6)
    assert rows[2] == 0  # the row that fills the batch


def test_a_pair_that_is_too_long_loses_the_start_of_its_context():
    batches = []

    def recorded(state, batch):
        batches.append(batch)
        return by_length(state, batch)

    answer(recorded, None, [Question("0123456789", ("x", "yz"), 0)], **ROWS)
    batch = batches[0]
    assert bytes(batch["inputs"][0].tolist()) == b"23456789"
    assert bytes(batch["inputs"][1].tolist()) == b"3456789y"
    assert batch["loss_mask"].sum(-1).tolist() == [1, 2, 0]
    assert batch["segment_ids"].sum(-1).tolist() == [8, 8, 0]


def test_a_choice_longer_than_a_row_raises():
    with pytest.raises(ValueError, match="at most 8 tokens.*got 9 tokens"):
        answer(by_length, None, [Question("a", ("b" * 9, "c"), 0)], **ROWS)


def test_a_file_of_questions_is_read(tmp_path):
    value = {"context": "2 + 2 =", "choices": [" 4", " 5"], "answer": 0}
    path = tmp_path / "questions.jsonl"
    path.write_text(json.dumps(value) + "\n\n" + json.dumps(value | {"answer": 1}))
    found = read_questions(path)
    assert [question.answer for question in found] == [0, 1]
    assert found[0] == Question("2 + 2 =", (" 4", " 5"), 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"answer": 2}, "answer must be from 0 to 1, got answer=2"),
        ({"answer": "0"}, "answer='0', not of type int"),
        ({"choices": ["a"]}, "choices must be two or more"),
        ({"choices": ["a", 3]}, "not all of them text"),
        ({"context": ""}, "context must not be empty"),
        ({"label": 0}, "not an object of context, choices, answer"),
    ],
)
def test_a_line_that_is_no_question_is_named(tmp_path, change, message):
    value = {"context": "a", "choices": ["b", "c"], "answer": 0}
    path = tmp_path / "questions.jsonl"
    path.write_text(json.dumps(value) + "\n" + json.dumps(value | change))
    with pytest.raises(ValueError, match="line 2 of .*must be a question") as caught:
        read_questions(path)
    assert message in str(caught.value)


@pytest.mark.parametrize(("text", "message"), [("", "must hold"), ("{", "line 1")])
def test_a_file_without_questions_raises(tmp_path, text, message):
    path = tmp_path / "questions.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=message):
        read_questions(path)
