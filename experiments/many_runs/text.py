"""A whole corpus on the device, and its batches cut out there."""

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from fp4jax import data
from fp4jax.data import Corpus, DataConfig, Documents
from fp4jax.train import Batch


class Text(NamedTuple):
    """The training rows of all domains, one after another.

    Attributes:
      inputs: uint16 or uint32 [r, t].
      targets: likewise, the token after each input.
      sizes: int32 [r], how many tokens of a row are no padding.
    """

    inputs: jax.Array | NDArray[np.unsignedinteger]
    targets: jax.Array | NDArray[np.unsignedinteger]
    sizes: jax.Array | NDArray[np.int32]


def read(corpus: Corpus, length: int) -> Text:
    """Returns the rows that `data.train_batches` draws from, on the host."""
    parts = [_rows(domain.train, length) for domain in corpus.domains]
    return Text(*map(np.concatenate, zip(*parts, strict=True)))


def _rows(documents: Documents, length: int) -> Text:
    """Returns the rows of a domain; no last token is an input, no first a target."""
    tokens, ends = documents.tokens[:], documents.ends
    starts = np.concatenate([[0], ends[:-1]])
    count = documents.num_targets
    rows = -(-count // length)

    def cut(skipped: NDArray[np.int64]) -> NDArray[np.unsignedinteger]:
        kept = np.delete(tokens, skipped)
        return np.pad(kept, (0, rows * length - count)).reshape(rows, length)

    sizes = np.minimum(count - length * np.arange(rows), length)
    return Text(cut(ends - 1), cut(starts), sizes.astype(np.int32))


def orders(
    corpus: Corpus, config: DataConfig, *, steps: int
) -> Iterator[NDArray[np.int32]]:
    """Yields which rows of `read` are in the next batches of `train_batches`, [n, b].

    Args:
      corpus: of the rows.
      config: as of `data.train_batches`.
      steps: n, batches at once.
    """
    drawn: Any = data.row_order(corpus, config)
    sizes = (
        -(-domain.train.num_targets // config.sequence_length)
        for domain in corpus.domains
    )
    first = np.cumsum([0, *sizes])
    for batch in itertools.count(step=steps):
        places = range(batch * config.batch_size, (batch + steps) * config.batch_size)
        rows = [first[domain] + row for domain, row in (drawn[i] for i in places)]
        yield np.array(rows, np.int32).reshape(steps, config.batch_size)


def batch(text: Text, rows: jax.Array) -> Batch:
    """Returns rows [b] of a text as a batch whose rows are one document each.

    What precedes a document in its row is seen as well: attention without a mask of
    documents takes cuDNN, and not the matrix of all pairs.
    """
    inputs, targets = (x[rows].astype(jnp.int32) for x in text[:2])
    place = jnp.arange(inputs.shape[1])[None]
    mask = (place < text.sizes[rows][:, None]).astype(jnp.float32)
    return {"inputs": inputs, "targets": targets, "loss_mask": mask}


def without_documents(rows: Batch) -> Batch:
    """Returns a batch of `fp4jax.data` as `batch` makes them."""
    return {name: rows[name] for name in ("inputs", "targets", "loss_mask")}
