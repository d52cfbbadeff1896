"""N-grams equal brute force, and their probabilities sum to one."""

import collections
import math

import numpy as np
import pytest

from experiments import ngram

VOCAB = 6
ORDERS = pytest.mark.parametrize("order", [1, 2, 3, 4])


def make_batch(seed, rows=5, length=23):
    """Random segments, the last one of each row padded."""
    rng = np.random.default_rng(seed)
    segment_ids = np.cumsum(rng.random((rows, length)) < 0.2, axis=1) + 1
    segment_ids[:, -3:] = 0
    return {
        "inputs": rng.integers(0, VOCAB, (rows, length), np.int32),
        "targets": rng.integers(0, VOCAB - 1, (rows, length), np.int32) ** 2 % VOCAB,
        "segment_ids": segment_ids.astype(np.int32),
        "loss_mask": np.float32(segment_ids > 0),
    }


def grams(batch, order):
    """Yields tuples of order tokens; None stands before a segment."""
    for inputs, targets, segments, mask in zip(
        *(batch[k].tolist() for k in ("inputs", "targets", "segment_ids", "loss_mask")),
        strict=True,
    ):
        for i in range(len(inputs)):
            context = tuple(
                inputs[j] if j >= 0 and segments[j] == segments[i] else None
                for j in range(i - order + 2, i + 1)
            )
            if mask[i]:
                yield (*context, targets[i])


class BruteForce:
    """The formula of `ngram`, with dictionaries."""

    def __init__(self, batches, order):
        seen = [gram for batch in batches for gram in grams(batch, order)]
        self.counts = []  # highest order first
        for _ in range(order):
            self.counts.append(collections.Counter(seen))
            seen = [gram[1:] for gram in self.counts[-1]]

    def probability(self, gram, level=0):
        if not gram:
            return 1 / VOCAB
        counts = self.counts[level]
        follow = {g[-1]: c for g, c in counts.items() if g[:-1] == gram[:-1]}
        lower = self.probability(gram[1:], level + 1)
        if not follow:
            return lower
        n1, n2 = (sum(c == i for c in counts.values()) for i in (1, 2))
        discount = (n1 + 1) / (n1 + 2 * n2 + 2)
        discounted = max(follow.get(gram[-1], 0) - discount, 0)
        return (discounted + discount * len(follow) * lower) / sum(follow.values())


@ORDERS
def test_equals_brute_force(order):
    train, heldout = [make_batch(0), make_batch(1)], [make_batch(2), make_batch(3)]
    model = ngram.fit(iter(train), order=order, vocab_size=VOCAB)
    token_bytes = np.array([1, 2, 3, 1, 2, 0])
    nats, bits = ngram.evaluate(model, iter(heldout), token_bytes=token_bytes)

    reference = BruteForce(train, order)
    targets = [gram for batch in heldout for gram in grams(batch, order)]
    total = -sum(math.log(reference.probability(gram)) for gram in targets)
    num_bytes = sum(token_bytes[gram[-1]] for gram in targets)
    assert nats == pytest.approx(total / len(targets), rel=1e-12)
    assert bits == pytest.approx(total / math.log(2) / num_bytes, rel=1e-12)


@ORDERS
def test_probabilities_sum_to_one(order):
    model = ngram.fit([make_batch(0, rows=2)], order=order, vocab_size=VOCAB)
    # Every context, seen or not, those that begin before the segment included.
    contexts = np.arange((VOCAB + 1) ** (order - 1))[:, None] * (VOCAB + 1)
    p = ngram._probability(model, contexts + np.arange(VOCAB))
    assert np.all(p > 0)
    np.testing.assert_allclose(p.sum(1), 1, rtol=1e-12)


def test_masked_targets_do_not_count():
    batch = make_batch(0)
    noise = {**batch}
    for name in ("inputs", "targets"):
        noise[name] = np.where(batch["loss_mask"] > 0, batch[name], 3)
    scores = [
        ngram.evaluate(
            ngram.fit([b], order=3, vocab_size=VOCAB), [b], token_bytes=np.ones(VOCAB)
        )
        for b in (batch, noise)
    ]
    assert scores[0] == scores[1]


def test_a_longer_context_helps_where_it_decides():
    tokens = np.int32(np.arange(400) // 2 % 2)[None]  # 0 0 1 1 0 0 1 1 ...
    batch = {
        "inputs": tokens[:, :-1],
        "targets": tokens[:, 1:],
        "segment_ids": np.ones((1, 399), np.int32),
        "loss_mask": np.ones((1, 399), np.float32),
    }
    bigram, trigram = (
        ngram.evaluate(
            ngram.fit([batch], order=order, vocab_size=2),
            [batch],
            token_bytes=np.ones(2),
        )[0]
        for order in (2, 3)
    )
    assert bigram == pytest.approx(math.log(2), abs=0.01)
    assert trigram < 0.05


@pytest.mark.parametrize(("order", "vocab_size"), [(0, 6), (4, 100_000)])
def test_an_order_out_of_range_raises(order, vocab_size):
    with pytest.raises(ValueError, match=f"^fit: order must .* got order={order} with"):
        ngram.fit([make_batch(0)], order=order, vocab_size=vocab_size)
