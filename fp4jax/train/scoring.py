"""Multiple choice by log-likelihood: the answer that a model finds most probable."""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from numpy.typing import NDArray

from fp4jax.nnx import set_step
from fp4jax.train.losses import Batch, masked_losses
from fp4jax.train.state import TrainState
from fp4jax.train.step import compiler_options

LogLikelihoods = Callable[[TrainState, Batch], jax.Array]

_FIELDS = {"context": str, "choices": list, "answer": int}


class Encoder(Protocol):
    """What turns text into tokens, such as the tokenizer of a corpus."""

    def encode(self, texts: Sequence[str]) -> Iterator[NDArray[np.integer]]:
        """Yields the tokens of each text."""
        ...


@dataclass(frozen=True)
class Question:
    """A text, how it may go on, and which of these is right.

    Attributes:
      context: not empty; a choice follows it at once, so that a space between them
        belongs to the choice.
      choices: two or more, none empty.
      answer: index of the right one.

    Raises:
      ValueError: an empty text, less than two choices, or an answer that is not one.
    """

    context: str
    choices: tuple[str, ...]
    answer: int

    def __post_init__(self):
        if not self.context:
            raise ValueError("Question: context must not be empty, got context=''.")
        if len(self.choices) < 2 or not all(self.choices):
            raise ValueError(
                "Question: choices must be two or more, none empty, got "
                f"choices={self.choices}."
            )
        if not 0 <= self.answer < len(self.choices):
            raise ValueError(
                f"Question: answer must be from 0 to {len(self.choices) - 1}, got "
                f"answer={self.answer}."
            )


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """The part of questions whose right answer is the most probable one.

    Attributes:
      by_sum: probability of the whole choice.
      by_byte: its log-likelihood per byte, which does not favor short choices.
      questions: how many there are.
    """

    by_sum: float
    by_byte: float
    questions: int


def read_questions(path: Path | str) -> list[Question]:
    """Reads lines of JSON with the fields of a `Question`.

        {"context": "2 + 2 =", "choices": [" 4", " 5"], "answer": 0}

    Args:
      path: of a file in UTF-8; blank lines hold none.

    Raises:
      ValueError: no questions, or a line that is none, by its number.
      OSError: the file cannot be read.
    """
    questions = []
    with open(path, encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                try:
                    questions.append(_question(json.loads(line)))
                except ValueError as error:
                    raise ValueError(
                        f"read_questions: line {number} of {str(path)!r} must be a "
                        f"question, got: {error}"
                    ) from error
    if not questions:
        raise ValueError(f"read_questions: {str(path)!r} must hold a question.")
    return questions


def make_log_likelihoods(graph: nnx.GraphDef) -> LogLikelihoods:
    """Returns the jitted `f(state, batch) -> [b] float32`, a sum for every row.

    log p = sum_i mask_i (logits_i[target_i] - logsumexp(logits_i))

    Args:
      graph: the model's; its forward pass may be quantized. Held amaxes are read only.
    """

    def log_likelihoods(state: TrainState, batch: Batch) -> jax.Array:
        model = state.model(graph)
        set_step(model, state.step)  # for recipes that draw in the forward pass
        return -jnp.sum(masked_losses(model, batch), axis=-1)

    return jax.jit(log_likelihoods, compiler_options=compiler_options(graph))


def answer(
    log_likelihoods: LogLikelihoods,
    state: TrainState,
    questions: Sequence[Question],
    *,
    tokenizer: Encoder,
    sequence_length: int,
    batch_size: int,
) -> Accuracy:
    """Returns how often the right choice is the most probable one; a tie goes first.

    Context and choice are encoded each for itself, and a pair takes one row. A pair
    that is longer than a row loses the start of its context. Under a recipe that scales
    whole tensors, what shares a batch also shares the scale.

    Args:
      log_likelihoods: from `make_log_likelihoods`.
      state: of the run.
      questions: from `read_questions`, at least one.
      tokenizer: what the model was trained on.
      sequence_length: tokens of a row, as in training.
      batch_size: rows that are computed at once.

    Raises:
      ValueError: a choice that fills a row without its context.
    """
    rows = []
    for question in questions:
        context, *choices = tokenizer.encode([question.context, *question.choices])
        rows += [_row(context, choice, sequence_length) for choice in choices]
    found: list[float] = []
    for start in range(0, len(rows), batch_size):
        part = rows[start : start + batch_size]
        padding = [_padding(sequence_length)] * (batch_size - len(part))
        batch = {
            name: np.stack([row[name] for row in (*part, *padding)]) for name in rows[0]
        }
        found += np.asarray(log_likelihoods(state, batch))[: len(part)].tolist()
    by_sum = by_byte = first = 0
    for question in questions:
        sums = np.array(found[first : first + len(question.choices)])
        sizes = [len(choice.encode()) for choice in question.choices]
        by_sum += int(np.argmax(sums) == question.answer)
        by_byte += int(np.argmax(sums / sizes) == question.answer)
        first += len(sums)
    count = len(questions)
    return Accuracy(by_sum=by_sum / count, by_byte=by_byte / count, questions=count)


def _question(value: Any) -> Question:
    if not isinstance(value, dict) or value.keys() != _FIELDS.keys():
        raise ValueError(f"{value!r}, not an object of {', '.join(_FIELDS)}.")
    for name, kind in _FIELDS.items():
        if not isinstance(value[name], kind) or isinstance(value[name], bool):
            raise ValueError(f"{name}={value[name]!r}, not of type {kind.__name__}.")
    if not all(isinstance(choice, str) for choice in value["choices"]):
        raise ValueError(f"choices={value['choices']}, not all of them text.")
    return Question(value["context"], tuple(value["choices"]), value["answer"])


def _row(
    context: NDArray[np.integer], choice: NDArray[np.integer], length: int
) -> dict[str, NDArray]:
    """Returns a row, each value [t], whose targets are the tokens of the choice."""
    tokens = np.concatenate([context, choice])[-(length + 1) :]
    size = len(tokens) - 1
    if len(choice) > size:
        raise ValueError(
            f"answer: choices must be at most {length} tokens, the length of a row, "
            f"got {len(choice)} tokens."
        )
    row = _padding(length)
    row["inputs"][:size], row["targets"][:size] = tokens[:-1], tokens[1:]
    row["segment_ids"][:size], row["positions"][:size] = 1, np.arange(size)
    row["loss_mask"][size - len(choice) : size] = 1
    return row


def _padding(length: int) -> dict[str, NDArray]:
    names = ("inputs", "targets", "segment_ids", "positions")
    row = {name: np.zeros(length, np.int32) for name in names}
    return row | {"loss_mask": np.zeros(length, np.float32)}
