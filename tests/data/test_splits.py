"""On which side of the split each document falls."""

import hashlib
import tracemalloc

import numpy as np
import pytest

from fp4jax.data.sources import Document
from fp4jax.data.splits import survey


def documents(count):
    texts = [f"document {i}" for i in range(count)]
    return [Document(t, t, hashlib.sha256(t.encode()).digest()) for t in texts]


def split(documents, holdout):
    found = survey(documents, holdout=holdout, source="test")
    return tuple(
        [d for d, inside in zip(documents, side, strict=True) if inside]
        for side in (found.train, found.heldout)
    )


@pytest.mark.parametrize("holdout", [0.02, 0.3])
def test_a_document_keeps_its_side_as_others_come(holdout):
    train, heldout = split(documents(2000), holdout)
    more_train, more_heldout = split(documents(4000), holdout)
    assert set(train) < set(more_train)
    assert set(heldout) < set(more_heldout)
    assert sorted(train + heldout) == sorted(documents(2000))
    standard_deviation = (2000 * holdout * (1 - holdout)) ** 0.5
    assert abs(len(heldout) - 2000 * holdout) < 4 * standard_deviation
    limit = int(holdout * 2**64).to_bytes(8, "big")
    assert heldout == [d for d in documents(2000) if d.digest < limit]


def test_of_equal_documents_the_first_is_kept():
    once = documents(50)
    train, heldout = split(once, 0.3)
    found = survey([*once, *once], holdout=0.3, source="test")
    assert not (found.train | found.heldout)[50:].any()
    assert found.train.sum() == len(train) and found.heldout.sum() == len(heldout)
    assert found.digest == survey(once, holdout=0.3, source="test").digest
    assert found.digest != survey(once[::-1], holdout=0.3, source="test").digest
    np.testing.assert_array_equal(found.lengths[:50], [len(d.text) for d in once])


def test_digests_compare_in_full():
    """Zeros at the end of a hash are digits, though NumPy's strings drop them."""
    digests = [b"\x80" + bytes(31), b"\x80" + bytes(30) + b"\1", b"\xff" * 32]
    found = survey([Document("", "a", d) for d in digests], holdout=0.5, source="test")
    assert found.heldout.tolist() == [True, False, False]  # at least the lowest


@pytest.mark.parametrize("holdout", [1e-9, 1 - 1e-9])
def test_no_split_is_empty(holdout):
    train, heldout = split(documents(5), holdout)
    assert min(len(train), len(heldout)) == 1


def test_one_document_cannot_be_split():
    with pytest.raises(ValueError, match="must be at least two, .* got 1. Pass"):
        split(documents(1), 0.5)


def test_no_document_at_all_raises():
    message = "^read_documents: source must hold at least one non-empty document, got "
    with pytest.raises(ValueError, match=f"{message}source='test'"):
        split([], 0.5)


def test_memory_is_what_the_docstrings_say():
    count, found = 20_000, documents(20_000)
    tracemalloc.start()
    kept = survey(found, holdout=0.02, source="test")
    size, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(kept.lengths) == count
    assert size / count < 11 and peak / count < 165
