"""The loss on held-out text, of every domain."""

from collections.abc import Callable

from fp4jax import data, train
from fp4jax.data import Corpus, DataConfig
from fp4jax.train import Batch, Evaluation, TrainState
from fp4jax.train.step import Metrics


def evaluate(
    step: Callable[[TrainState, Batch], Metrics],
    state: TrainState,
    corpus: Corpus,
    rows: DataConfig,
    *,
    place: Callable[[Batch], Batch] = lambda batch: batch,
) -> dict[str, Evaluation]:
    """Returns the loss on the held-out documents of each domain, by its name.

    Args:
      step: from `train.make_eval_step`.
      state: is only read.
      corpus: whose documents they are.
      rows: says how long rows are, and how many a batch has.
      place: puts a batch on the devices.
    """
    return {
        domain.name: train.evaluate(
            step,
            state,
            data.heldout_batches(corpus, rows, domain=domain.name),
            token_bytes=corpus.token_bytes,
            place=place,
        )
        for domain in corpus.domains
    }
