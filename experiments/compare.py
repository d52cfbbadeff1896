"""Trains a model on the same batches under several policies, and n-grams beside it."""

import dataclasses
import itertools
from collections.abc import Iterator

import jax

from experiments import ngram
from experiments.folder import Row
from experiments.report import Baseline, Trial
from experiments.trial import Run, Shared, Stopped, batches_of
from fp4jax import data

ORDERS = (2, 3)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Comparison(Shared):
    """The runs of every policy and seed, and the n-gram models."""

    @property
    def seeds(self) -> range:
        """One for each run of a policy."""
        run = self.config.run
        return range(run.seed, run.seed + run.seeds)

    def trials(self) -> Iterator[Trial]:
        """Yields the runs of every policy in turn.

        Raises:
          Stopped: a signal came.
        """
        for policy, seed in itertools.product(self.config.policies, self.seeds):
            yield Run(policy=policy, seed=seed, **vars(self))()

    def baselines(self) -> Iterator[Baseline]:
        """Yields n-gram models, fitted on exactly the batches of each seed.

        Those that an earlier command has fitted are read.

        Raises:
          Stopped: a signal came.
        """
        for order, seed in itertools.product(ORDERS, self.seeds):
            name = f"{order}-gram"
            found = self.folder.rows("baselines.jsonl", name, seed)
            row = found[0] if found else {"policy": name, "seed": seed}
            if not found:
                row |= self._fitted(order, seed)
                self.folder.write("baselines.jsonl", row)
            yield Baseline(
                name=name,
                seed=seed,
                heldout_loss=row["heldout_loss"],
                bits_per_byte=row["bits_per_byte"],
            )

    def _fitted(self, order: int, seed: int) -> Row:
        """Returns the losses of an n-gram model."""
        drawn = self._until_stopped(self.batches(seed))
        model = ngram.fit(drawn, order=order, vocab_size=self.config.data.vocab_size)
        heldout = data.heldout_batches(self.corpus, self.config.data)
        loss, bits = ngram.evaluate(
            model,
            self._until_stopped(heldout),
            token_bytes=self.corpus.token_bytes,
        )
        return {"heldout_loss": loss, "bits_per_byte": bits}

    def _until_stopped(self, batches: Iterator[data.Batch]) -> Iterator[data.Batch]:
        """Yields batches; of several processes none stops before they train."""
        for batch in batches:
            if jax.process_count() == 1 and self.stop():
                raise Stopped
            yield batch

    def batches(self, seed: int) -> Iterator[data.Batch]:
        """Yields what every policy trains on with a seed."""
        drawn = batches_of(self.corpus, self.config, seed)
        return itertools.islice(drawn, self.config.run.steps)
