"""Batches: which rows, in which order, for which host.

Batch n is a function of the corpus, the configuration and n alone. Its rows are those
at n B ... (n + 1) B - 1 of an endless sequence, which takes from each domain in
proportion to its weight and goes through a domain's rows in a new order every epoch.
Host h of H gets rows h B / H ... (h + 1) B / H - 1 of every batch.
"""

import weakref
from collections.abc import Iterator

import grain
import numpy as np
from absl import flags

from fp4jax.data.config import DataConfig
from fp4jax.data.corpus import Corpus
from fp4jax.data.packing import Batch, Rows

# For ever, yet few enough for the number of batches to fit 63 bits.
_EPOCHS = 2**30
_AHEAD = 8  # batches prepared before they are asked for, by a thread or by each worker


class Batches(Iterator[Batch]):
    """Batches of training rows for ever, the next ones prepared meanwhile.

    `get_state()` is `{"next": n}`, the number of the batch that comes next; after
    `set_state`, any iterator of the same corpus, configuration and shard goes on there.
    """

    def __init__(self, batches: grain.MapDataset[Batch], *, start: int, workers: int):
        self._batches, self._next, self._workers = batches, start, workers
        self._iterator: grain.DatasetIterator[Batch] | None = None

    def __next__(self) -> Batch:
        """Returns batch n, and goes on to n + 1.

        Raises:
          ChildProcessError: a worker process was killed.
          ValueError: a shard is damaged.
        """
        if self._iterator is None:
            self._iterator = _prepare(self._batches, self._next, workers=self._workers)
            self._close = weakref.finalize(self, self._iterator.close)
        try:
            batch = next(self._iterator)
        except BaseException as error:
            self.close()
            if isinstance(error, RuntimeError) and "terminated unexpec" in str(error):
                raise ChildProcessError(
                    "train_batches: worker processes must live as long as their "
                    f"iterator, got one that ended before batch {self._next}. Was it "
                    "killed for memory? Lower workers, and resume."
                ) from error
            raise
        self._next += 1
        return batch

    def get_state(self) -> dict[str, int]:
        """Returns where the iterator stands, a value that JSON has."""
        return {"next": self._next}

    def set_state(self, state: dict[str, int]) -> None:
        """Goes to where `get_state` was called."""
        self.close()
        self._next = state["next"]

    def close(self) -> None:
        """Ends threads and worker processes; the next `next` starts others."""
        if self._iterator is not None:
            self._close()
            self._iterator = None


def train_batches(
    corpus: Corpus,
    config: DataConfig,
    *,
    start: int = 0,
    shard: tuple[int, int] = (0, 1),
) -> Batches:
    """Draws batches of training rows for ever, each epoch in another order.

    Args:
      corpus: from `load_corpus`.
      config: batch_size, sequence_length and seed decide the batches; workers does not.
      start: number of the first batch.
      shard: (h, H), this host and the number of hosts.

    Returns:
      Iterator of `Rows` values, each [batch_size / H, sequence_length].

    Raises:
      ValueError: a domain is shorter than one row, or hosts do not divide a batch.
    """
    inside = _rows_of_host("train_batches", config, shard)
    if start < 0:
        raise ValueError(f"train_batches: start must be at least 0, got start={start}.")
    for domain in corpus.domains:
        if config.sequence_length > domain.train.num_targets:
            raise ValueError(
                "train_batches: sequence_length must be at most the "
                f"{domain.train.num_targets} training tokens of {domain.name!r}, got "
                f"sequence_length={config.sequence_length}. Shorten it or add text."
            )
    source = _Numbered(corpus, config, inside)
    return Batches(grain.MapDataset.source(source), start=start, workers=config.workers)


def heldout_batches(
    corpus: Corpus,
    config: DataConfig,
    *,
    domain: str | None = None,
    shard: tuple[int, int] = (0, 1),
) -> Iterator[Batch]:
    """Yields every held-out target once, in order.

    Args:
      corpus: from `load_corpus`.
      config: batch_size and sequence_length decide the batches.
      domain: name of the only one to read; None reads one after the other.
      shard: (h, H), this host and the number of hosts.

    Returns:
      Iterator of `Rows` values, each [batch_size / H, sequence_length]; the last batch
      of a domain ends in padding.

    Raises:
      ValueError: the corpus has no such domain, or hosts do not divide a batch.
    """
    inside = _rows_of_host("heldout_batches", config, shard)
    names = [each.name for each in corpus.domains]
    if domain is not None and domain not in names:
        raise ValueError(
            f"heldout_batches: domain must be one of {', '.join(names)}, got "
            f"domain={domain!r}."
        )
    read = [each for each in corpus.domains if domain in (None, each.name)]
    return _in_order([each.heldout for each in read], config, inside)


def _in_order(splits, config: DataConfig, inside: range) -> Iterator[Batch]:
    for documents in splits:
        rows = Rows(documents, config.sequence_length)
        for start in range(0, len(rows), config.batch_size):
            yield rows[start + np.array(inside)]


def row_order(corpus: Corpus, config: DataConfig) -> grain.MapDataset[tuple[int, int]]:
    """Returns which row each row of all batches is, as (number of its domain, row).

    Args:
      corpus: from `load_corpus`.
      config: sequence_length and seed decide the order; batch n has the batch_size
        rows from n batch_size on.
    """
    drawn = [
        grain.MapDataset.source(
            _Positions(number, len(Rows(domain.train, config.sequence_length)))
        )
        .seed(config.seed)
        .shuffle()
        .repeat(_EPOCHS)
        for number, domain in enumerate(corpus.domains)
    ]
    weights = [domain.weight for domain in corpus.domains]
    mix = lambda: grain.MapDataset.mix(drawn, weights=weights)
    return drawn[0] if len(drawn) == 1 else mix()


class _Numbered:
    """Random access to batches."""

    def __init__(self, corpus: Corpus, config: DataConfig, inside: range):
        length = config.sequence_length
        self._rows = [Rows(domain.train, length) for domain in corpus.domains]
        self._batch_size, self._inside = config.batch_size, inside
        self._order = row_order(corpus, config)

    def __len__(self) -> int:
        return len(self._order) // self._batch_size

    def __getitem__(self, index: int) -> Batch:
        first = index * self._batch_size
        drawn = [self._order[first + position] for position in self._inside]
        domain, row = np.array(drawn).T
        if len(self._rows) == 1:
            return self._rows[0][row]
        batch: Batch = {}
        for number in np.unique(domain):
            inside = domain == number
            for name, value in self._rows[number][row[inside]].items():
                shape = (len(domain), *value.shape[1:])
                batch.setdefault(name, np.empty(shape, value.dtype))[inside] = value
        return batch


class _Positions:
    """The rows of one domain, as (domain, row)."""

    def __init__(self, domain: int, size: int):
        self._domain, self._size = domain, size

    def __len__(self) -> int:
        return self._size

    def __getitem__(self, index: int) -> tuple[int, int]:
        return self._domain, index


def _prepare(
    batches: grain.MapDataset[Batch], start: int, *, workers: int
) -> grain.DatasetIterator[Batch]:
    """Returns batches start, start + 1, ..., prepared by a thread or by processes."""
    ahead = grain.ReadOptions(num_threads=1, prefetch_buffer_size=_AHEAD)
    prepared = batches[start:].to_iter_dataset(ahead)
    if workers:
        if not flags.FLAGS.is_parsed():  # Grain reads its flags in processes
            flags.FLAGS.mark_as_parsed()
        prepared = prepared.mp_prefetch(grain.MultiprocessingOptions(workers))
    return iter(prepared)


def _rows_of_host(function: str, config: DataConfig, shard: tuple[int, int]) -> range:
    """Returns the rows of each batch that host h of H gets."""
    host, hosts = shard
    if not 0 <= host < hosts or config.batch_size % hosts:
        raise ValueError(
            f"{function}: shard must be (h, H) with 0 <= h < H, and H must divide the "
            f"batch, got shard={shard} with batch_size={config.batch_size}."
        )
    size = config.batch_size // hosts
    return range(host * size, (host + 1) * size)
