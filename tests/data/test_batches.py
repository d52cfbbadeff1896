"""Every target falls into one row of an epoch, and an iterator resumes exactly."""

import dataclasses
import itertools
import json

import numpy as np
import pytest

from fp4jax.data import (
    Corpus,
    DataConfig,
    Documents,
    Domain,
    heldout_batches,
    train_batches,
)
from fp4jax.data.tokenizers import ByteTokenizer

END = 299
LENGTHS = (3, 1, 8, 30, 1, 1, 2, 17, 5)  # 68 tokens and as many targets
CONFIG = DataConfig(
    tokenizer="bytes", vocab_size=END + 1, sequence_length=8, batch_size=4
)


@pytest.fixture(scope="module")
def corpus():
    documents, start = [], 0
    for length in LENGTHS:  # all tokens differ, so a pair tells where it is from
        documents.append(np.uint16([*range(start, start + length), END]))
        start += length
    ends = np.cumsum([len(document) for document in documents])
    split = Documents(np.concatenate(documents), ends)
    return Corpus((Domain("text", 1.0, split, split),), ByteTokenizer(END + 1), "")


def pairs(documents):
    return sorted(
        pair for document in documents for pair in itertools.pairwise(document.tolist())
    )


def masked_pairs(batches):
    return sorted(
        pair
        for batch in batches
        for pair in zip(
            batch["inputs"][batch["loss_mask"] > 0].tolist(),
            batch["targets"][batch["loss_mask"] > 0].tolist(),
            strict=True,
        )
    )


def assert_equal(one, other):
    assert one.keys() == other.keys()
    for name in one:
        np.testing.assert_array_equal(one[name], other[name])


@pytest.mark.parametrize("sequence_length", [1, 7, 17, 68, 100])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_heldout_batches_hold_every_target_once(corpus, sequence_length, batch_size):
    config = dataclasses.replace(
        CONFIG, sequence_length=sequence_length, batch_size=batch_size
    )
    batches = list(heldout_batches(corpus, config))
    assert masked_pairs(batches) == pairs(corpus.domains[0].heldout)
    assert len(batches) == -(-sum(LENGTHS) // (sequence_length * batch_size))
    for batch in batches:
        for name, value in batch.items():
            assert value.shape == (batch_size, sequence_length)
            assert value.dtype == (np.float32 if name == "loss_mask" else np.int32)


def test_segments_never_cross_documents(corpus):
    for batch in itertools.islice(train_batches(corpus, CONFIG), 20):
        segment_ids, inputs = batch["segment_ids"], batch["inputs"]
        np.testing.assert_array_equal(segment_ids > 0, batch["loss_mask"] > 0)
        same = (segment_ids[:, 1:] == segment_ids[:, :-1]) & (segment_ids[:, 1:] > 0)
        step = np.diff(batch["positions"])
        assert np.all(step[same] == 1)
        assert np.all(batch["positions"][:, 1:][~same] == 0)
        np.testing.assert_array_equal(
            np.diff(segment_ids)[segment_ids[:, 1:] > 0],
            (batch["targets"] == END)[:, :-1][segment_ids[:, 1:] > 0],
        )
        assert np.all(inputs[:, 1:][same] == batch["targets"][:, :-1][same])
        assert END not in inputs


def test_each_epoch_holds_every_target_once_in_another_order(corpus):
    config = dataclasses.replace(CONFIG, batch_size=3)  # 9 rows: 3 batches an epoch
    batches = list(itertools.islice(train_batches(corpus, config), 9))
    epochs = [batches[start : start + 3] for start in (0, 3, 6)]
    for epoch in epochs:
        assert masked_pairs(epoch) == pairs(corpus.domains[0].train)
    orders = {np.stack([b["inputs"] for b in epoch]).tobytes() for epoch in epochs}
    assert len(orders) == 3


def test_the_seed_alone_decides_the_order(corpus):
    def order(seed):
        batches = train_batches(corpus, dataclasses.replace(CONFIG, seed=seed))
        return np.stack([next(batches)["inputs"] for _ in range(6)])

    np.testing.assert_array_equal(order(0), order(0))
    # The second epoch of one seed is not the first of the next.
    orders = [order(seed) for seed in range(4)]
    assert len({epoch.tobytes() for o in orders for epoch in (o[:3], o[3:])}) == 8


@pytest.mark.parametrize("steps", [0, 1, 5])
def test_a_saved_state_is_restored_exactly(corpus, steps):
    batches = train_batches(corpus, CONFIG)
    for _ in range(steps):
        next(batches)
    state = json.loads(json.dumps(batches.get_state()))
    assert state == {"next": steps}
    expected = list(itertools.islice(batches, 7))
    batches.set_state(state)  # back in the same iterator, and on in a new one
    for restored in (batches, train_batches(corpus, CONFIG)):
        restored.set_state(state)
        for one, other in zip(expected, restored, strict=False):
            assert_equal(one, other)


def test_batches_of_one_row(corpus):
    config = dataclasses.replace(CONFIG, batch_size=1)
    batch = next(train_batches(corpus, config))
    assert batch["inputs"].shape == (1, CONFIG.sequence_length)


def test_a_row_longer_than_the_corpus_raises(corpus):
    longest = dataclasses.replace(CONFIG, sequence_length=sum(LENGTHS))
    assert next(train_batches(corpus, longest))["loss_mask"].all()
    config = dataclasses.replace(longest, sequence_length=sum(LENGTHS) + 1)
    message = (
        "sequence_length must be at most .* 68 training tokens of 'text', got .*=69"
    )
    with pytest.raises(ValueError, match=f"^train_batches: {message}"):
        train_batches(corpus, config)


def test_start_is_a_place_in_the_sequence(corpus):
    whole = list(itertools.islice(train_batches(corpus, CONFIG), 8))
    for start in (0, 5):
        batches = train_batches(corpus, CONFIG, start=start)
        assert batches.get_state() == {"next": start}
        for expected in whole[start:]:
            assert_equal(next(batches), expected)
    with pytest.raises(ValueError, match="start must be at least 0, got start=-1"):
        train_batches(corpus, CONFIG, start=-1)


@pytest.mark.parametrize("hosts", [2, 4])
def test_hosts_share_a_batch(corpus, hosts):
    def batches(shard):
        return [
            *itertools.islice(train_batches(corpus, CONFIG, shard=shard), 5),
            *heldout_batches(corpus, CONFIG, shard=shard),
        ]

    parts = zip(*[batches((h, hosts)) for h in range(hosts)], strict=True)
    for part, whole in zip(parts, batches((0, 1)), strict=True):
        joined = {name: np.concatenate([p[name] for p in part]) for name in whole}
        assert_equal(joined, whole)


@pytest.mark.parametrize("shard", [(0, 3), (2, 2), (-1, 2)])
def test_a_host_that_there_is_not_raises(corpus, shard):
    for draw in (train_batches, heldout_batches):
        with pytest.raises(ValueError, match="shard must be .h, H.*with batch_size=4"):
            draw(corpus, CONFIG, shard=shard)


@pytest.fixture(scope="module")
def mixed(corpus):
    """The corpus, and a domain of other tokens with a third of its weight."""
    documents = Documents(np.uint16([*range(100, 299), END]), np.array([200]))
    other = Domain("other", 1.0, documents, documents)
    first = dataclasses.replace(corpus.domains[0], weight=3.0)
    return dataclasses.replace(corpus, domains=(first, other))


def test_domains_are_drawn_by_weight(mixed):
    rows = [
        row
        for batch in itertools.islice(train_batches(mixed, CONFIG), 100)
        for row in batch["inputs"]
    ]
    other = [bool(np.all((row == 0) | (row >= 100))) for row in rows]
    assert sum(other) == 100  # 400 rows, a quarter of them
    assert max(map(sum, zip(*[iter(other)] * 8, strict=True))) <= 3  # evenly


def test_each_domain_keeps_its_own_order(corpus, mixed):
    """A domain's rows come in the order in which they come alone."""
    alone = itertools.islice(train_batches(corpus, CONFIG), 20)
    alone = [row.tolist() for batch in alone for row in batch["inputs"]]
    drawn = itertools.islice(train_batches(mixed, CONFIG), 20)
    drawn = [row.tolist() for batch in drawn for row in batch["inputs"]]
    drawn = [row for row in drawn if max(row) < 100]
    assert drawn == alone[: len(drawn)] and len(drawn) == 60


def test_heldout_domains_are_read_alone_or_in_turn(corpus, mixed):
    one, other = (
        list(heldout_batches(mixed, CONFIG, domain=name)) for name in ("text", "other")
    )
    for found, expected in zip(
        heldout_batches(mixed, CONFIG), [*one, *other], strict=True
    ):
        assert_equal(found, expected)
    for found, expected in zip(one, heldout_batches(corpus, CONFIG), strict=True):
        assert_equal(found, expected)
    with pytest.raises(
        ValueError, match="must be one of text, other, got domain='code"
    ):
        heldout_batches(mixed, CONFIG, domain="code")


def test_a_finished_iterator_starts_again(corpus):
    batches = train_batches(corpus, CONFIG)
    first = next(batches)
    batches.close()
    second = next(batches)
    batches.set_state({"next": 0})
    assert_equal(next(batches), first)
    assert_equal(next(batches), second)


def test_the_order_of_recorded_results(corpus):
    """Results were committed that rest on this order of rows."""
    drawn = itertools.islice(train_batches(corpus, CONFIG), 4)
    first_tokens = [batch["inputs"][:, 0].tolist() for batch in drawn]
    assert first_tokens[:2] == [[8, 16, 32, 40], [24, 56, 64, 48]]
    assert first_tokens[2:] == [[0, 56, 48, 8], [64, 16, 0, 24]]
