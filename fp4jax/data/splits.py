"""The first pass over a source: its documents, and on which side each of them is."""

import hashlib
from array import array
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from fp4jax.data.sources import Document

_DIGEST = hashlib.sha256().digest_size


@dataclass(frozen=True, eq=False)
class Survey:
    """Every document of a source, by position; 10 bytes for each.

    Attributes:
      lengths: [n] int64, in characters.
      train, heldout: [n] bool; neither holds a document that repeats an earlier one.
      digest: hash of all that is kept, in order.
    """

    lengths: NDArray[np.int64]
    train: NDArray[np.bool_]
    heldout: NDArray[np.bool_]
    digest: bytes


def survey(documents: Iterable[Document], *, holdout: float, source: str) -> Survey:
    """Splits the documents by hash, and drops those that repeat an earlier one.

    Sorting the hashes takes about 160 bytes a document.

    Raises:
      ValueError: there are fewer than two different documents.
    """
    digests, lengths = bytearray(), array("q")
    for document in documents:
        digests += document.digest
        lengths.append(len(document.text))
    if not lengths:
        raise ValueError(
            "read_documents: source must hold at least one non-empty document, got "
            f"source={source!r} without any. Put text into its files."
        )
    # NumPy pads byte strings with zeros to equal length, so these compare in full.
    table = np.frombuffer(digests, f"S{_DIGEST}")
    different, first = np.unique(table, return_index=True)
    kept = np.zeros(len(table), bool)
    kept[first] = True
    trained = table >= different[num_heldout(different, holdout)]
    train, heldout = kept & trained, kept & ~trained
    digest = hashlib.sha256(int(train.sum()).to_bytes(8, "big"))
    for side in (train, heldout):
        digest.update(table.view(f"V{_DIGEST}")[side].tobytes())
    return Survey(np.array(lengths, np.int64), train, heldout, digest.digest())


def num_heldout(digests: NDArray[np.bytes_], holdout: float) -> int:
    """Returns how many of the sorted, different digests are held out.

    Held out are the hashes in the lowest `holdout` part of their range, but at least
    the lowest one and never all, so a document keeps its side as others come and go.

    Raises:
      ValueError: there are fewer than two.
    """
    if len(digests) < 2:
        raise ValueError(
            "split_documents: documents must be at least two, as one is held out, got "
            f"{len(digests)}. Pass a folder of text files, or put '\\n\\0\\n' "
            "between the documents of one file."
        )
    limit = int(holdout * 2**64).to_bytes(8, "big")
    count = int(np.searchsorted(digests, np.bytes_(limit)))
    return min(max(count, 1), len(digests) - 1)
