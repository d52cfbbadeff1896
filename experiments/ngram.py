"""N-gram baselines with interpolated Kneser-Ney smoothing, on the model's own batches.

    p(w | h) = (max(c(h w) - D, 0) + D * T(h) * p(w | h')) / c(h)

h' drops the oldest token of the context h, c(h) sums c(h w) over w, T(h) is the number
of different w after h, and an unseen h leaves p(w | h'). The counts c of the full order
are occurrences; below it, c(h w) is the number of different tokens seen before h w. The
recursion ends in 1 / vocab_size. D = (n1 + 1) / (n1 + 2 n2 + 2), where n_i grams have
the count i: the usual estimate, kept inside (0, 1) so that no gram is impossible.

References: Kneser and Ney 1995; Chen and Goodman 1999, section 2.7.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fp4jax.data import Batch

SMOOTHING = "interpolated Kneser-Ney"


class Level(NamedTuple):
    """The counts of one order, by sorted codes; see `_codes`."""

    discount: float
    grams: NDArray[np.int64]  # [g], h w
    gram_counts: NDArray[np.int64]  # [g], c(h w)
    contexts: NDArray[np.int64]  # [c], h
    context_counts: NDArray[np.int64]  # [c], c(h)
    context_kinds: NDArray[np.int64]  # [c], T(h)


@dataclass(frozen=True, eq=False)
class NGram:
    """A fitted model: `levels` holds the orders 1 to n."""

    vocab_size: int
    levels: tuple[Level, ...]


def fit(batches: Iterable[Batch], *, order: int, vocab_size: int) -> NGram:
    """Counts the grams of `order` tokens (2: one of context) that end in a target.

    Args:
      batches: as `fp4jax.data.train_batches` gives them.
      order: 1 and up; `(vocab_size + 1) ** order` must fit 63 bits.
      vocab_size: tokens that share the probability.

    Raises:
      ValueError: order is out of range.
    """
    if order < 1 or (vocab_size + 1) ** order >= 2**63:
        raise ValueError(
            "fit: order must be at least 1 with (vocab_size + 1) ** order below 2**63, "
            f"got order={order} with vocab_size={vocab_size}."
        )
    codes = np.concatenate(
        [_codes(b, order=order, vocab_size=vocab_size) for b in batches]
    )
    levels = []
    for n in range(order, 0, -1):
        grams, counts = np.unique(codes, return_counts=True)
        levels.append(_level(grams, counts, base=vocab_size + 1))
        codes = grams % (vocab_size + 1) ** (n - 1)  # each kind of gram counts once
    return NGram(vocab_size, tuple(reversed(levels)))


def evaluate(
    model: NGram, batches: Iterable[Batch], *, token_bytes: NDArray[np.integer]
) -> tuple[float, float]:
    """Returns the mean nats/token and bits/byte of the targets in `batches`.

    Args:
      model: from `fit`.
      batches: as `fp4jax.data.heldout_batches` gives them.
      token_bytes: [vocab_size], the bytes that each token spells.
    """
    order = len(model.levels)
    codes = np.concatenate(
        [_codes(b, order=order, vocab_size=model.vocab_size) for b in batches]
    )
    nats = -np.log(_probability(model, codes)).sum()
    num_bytes = token_bytes[codes % (model.vocab_size + 1)].sum()
    return float(nats / len(codes)), float(nats / np.log(2) / num_bytes)


def _codes(batch: Batch, *, order: int, vocab_size: int) -> NDArray[np.int64]:
    """Returns one number for each target with its context, oldest token first.

    Digits are tokens in base vocab_size + 1; the last digit's value, vocab_size, stands
    for what lies before the segment, where the model does not look either.
    """
    segment_ids, length = batch["segment_ids"], batch["inputs"].shape[1]
    code = batch["targets"].astype(np.int64)
    for age in range(order - 1):
        past = lambda x, age=age: np.pad(x, ((0, 0), (age, 0)))[:, :length]
        token = np.where(
            past(segment_ids) == segment_ids, past(batch["inputs"]), vocab_size
        )
        code += token * np.int64(vocab_size + 1) ** (age + 1)
    return code[batch["loss_mask"] > 0]


def _level(grams: NDArray[np.int64], counts: NDArray[np.int64], *, base: int) -> Level:
    """Sums the counts of sorted grams by their context."""
    contexts, first, kinds = np.unique(
        grams // base, return_index=True, return_counts=True
    )
    n1, n2 = np.count_nonzero(counts == 1), np.count_nonzero(counts == 2)
    discount = float((n1 + 1) / (n1 + 2 * n2 + 2))
    return Level(
        discount, grams, counts, contexts, np.add.reduceat(counts, first), kinds
    )


def _probability(model: NGram, codes: NDArray[np.int64]) -> NDArray[np.float64]:
    """Returns p(w | h) of each code, from the lowest order up."""
    base = model.vocab_size + 1
    p = np.full(codes.shape, 1 / model.vocab_size)
    for n, level in enumerate(model.levels, start=1):
        gram = codes % base**n
        context = gram // base
        count = _lookup(gram, keys=level.grams, values=level.gram_counts)
        total = _lookup(context, keys=level.contexts, values=level.context_counts)
        kinds = _lookup(context, keys=level.contexts, values=level.context_kinds)
        mass = np.maximum(count - level.discount, 0) + level.discount * kinds * p
        p = np.where(total > 0, mass / np.maximum(total, 1), p)
    return p


def _lookup(
    codes: NDArray[np.int64], *, keys: NDArray[np.int64], values: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Returns the values of `codes` among the sorted keys, 0 where absent."""
    index = np.minimum(np.searchsorted(keys, codes), len(keys) - 1)
    return np.where(keys[index] == codes, values[index], 0)
